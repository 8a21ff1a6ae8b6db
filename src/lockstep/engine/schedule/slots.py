"""The slots as arrays, kept from launch to launch: only what a sequence changes is written."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int, Int32

from lockstep.engine.schedule.batch import Capacity, DecodeBatch
from lockstep.engine.schedule.results import DecodeResults
from lockstep.engine.schedule.sequence import Sequence

type Slot = tuple[int, int] | tuple[np.ndarray, np.ndarray]
"""A replica and a slot, or as many replicas and slots."""


class DecodeSlots:
    """The next decode batch. A sequence is written when it gets its slot, and then moves on with each launch.

    Args:
        capacity: The capacities.
    """

    def __init__(self, capacity: Capacity) -> None:
        one = dataclasses.replace(capacity, replicas=1, idle_replicas=0, slots=1, sequences=1)
        self._next = DecodeBatch.empty(capacity, 0)
        self._idle = DecodeBatch.empty(one, 0)
        self._has_stop_tokens = np.zeros(self._next.token.shape, bool)
        self.has_stop_strings = np.zeros(self._next.token.shape, bool)
        """Whether the sequence in each slot has stop strings."""
        self.sequences = np.full(self._next.token.shape, None, object)
        """The sequence in each slot, or None."""

    @property
    def remaining(self) -> Int[np.ndarray, " sequence"]:
        """The number of tokens that each sequence in a slot may still sample."""
        left = self._next.remaining
        return left[left > 0]

    @property
    def all_remaining(self) -> Int32[np.ndarray, "replica slot"]:
        """The number of tokens that the sequence in each slot may still sample; 0 in idle slots."""
        return self._next.remaining

    @property
    def may_stop(self) -> bool:
        """Whether a sequence in a slot may end before its last token."""
        return bool((self._has_stop_tokens | self.has_stop_strings).any())

    def put(self, sequence: Sequence) -> None:
        """Writes a sequence that was given its slot and its pages."""
        at, params, batch = (sequence.replica, sequence.slot), sequence.request.params, self._next
        batch.token[at] = sequence.last_token
        batch.position[at] = sequence.position
        batch.remaining[at] = sequence.remaining
        batch.page_table[at][: len(sequence.pages)] = sequence.pages
        batch.stop_ids[at][: len(params.stops)] = params.stops
        batch.draw[at] = (params.seed, sequence.request.prompt_id, sequence.generation_id)
        batch.temperature[at] = params.temperature
        batch.sampling.set(at, sequence)
        self._has_stop_tokens[at], self.has_stop_strings[at] = bool(params.stops), bool(params.stop)
        self.sequences[at] = sequence

    def clear(self, at: Slot) -> None:
        """Makes slots idle."""
        for array, idle in zip(self._next.arrays().values(), self._idle.arrays().values(), strict=True):
            array[at] = idle[0, 0]
        self._has_stop_tokens[at] = self.has_stop_strings[at] = False
        self.sequences[at] = None

    def advance(
        self, results: DecodeResults
    ) -> tuple[Int[np.ndarray, "replica slot"], Bool[np.ndarray, "replica slot"]]:
        """Moves every sequence on by what it sampled.

        Args:
            results: The results of the launch of the last `batch`.

        Returns:
            The number of tokens that each slot sampled, and whether the last of them is a stop token of the sequence.
        """
        batch, tokens = self._next, results.tokens
        counts = (tokens >= 0).sum(axis=-1, dtype=np.int32)
        last = np.take_along_axis(tokens, np.maximum(counts - 1, 0)[..., None], axis=-1)[..., 0]
        batch.sampling.extend_history(batch.position + 1, tokens)
        np.copyto(batch.token, last, where=counts > 0)
        np.add(batch.position, counts, out=batch.position)
        np.subtract(batch.remaining, counts, out=batch.remaining)
        return counts, (counts > 0) & (last[..., None] == batch.stop_ids).any(axis=-1)

    def batch(self, num_steps: int) -> DecodeBatch:
        """Returns the arrays of a launch of ``num_steps``, which later changes leave as they are."""
        return self._next.copy(num_steps)
