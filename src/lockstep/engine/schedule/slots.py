"""The slots as arrays, kept from launch to launch: only what a sequence changes is written."""

import dataclasses
import itertools

import numpy as np
from jaxtyping import Bool, Int, Int32

from lockstep.engine.schedule.batch import Capacity, DecodeBatch
from lockstep.engine.schedule.pages import NULL_PAGE
from lockstep.engine.schedule.results import DecodeResults
from lockstep.engine.schedule.sequence import Sequence

type Slot = tuple[int, int] | tuple[np.ndarray, np.ndarray]
"""A replica and a slot, or as many replicas and slots."""


class DecodeSlots:
    """The next decode batch. A sequence is written with all others that got a slot since the last launch, and then
    moves on with each launch.
    """

    def __init__(self, capacity: Capacity) -> None:
        one = dataclasses.replace(capacity, replicas=1, idle_replicas=0, slots=1, sequences=1)
        self._next = DecodeBatch.empty(capacity, 0)
        self._new: list[Sequence] = []
        self._idle = DecodeBatch.empty(one, 0)
        self._has_stop_tokens = np.zeros(self._next.token.shape, bool)
        self.has_stop_strings = np.zeros(self._next.token.shape, bool)
        """Whether the sequence in each slot has stop strings; as of the last `batch`."""
        self.sequences = np.full(self._next.token.shape, None, object)
        """The sequence in each slot, or None; as of the last `batch`."""

    @property
    def remaining(self) -> Int[np.ndarray, " sequence"]:
        """The number of tokens that each sequence in a slot may still sample."""
        left = self.all_remaining
        return left[left > 0]

    @property
    def all_remaining(self) -> Int32[np.ndarray, "replica slot"]:
        """The number of tokens that the sequence in each slot may still sample; 0 in idle slots."""
        self._write_new()
        return self._next.remaining

    @property
    def may_stop(self) -> bool:
        """Whether a sequence in a slot may end before its last token."""
        self._write_new()
        return bool((self._has_stop_tokens | self.has_stop_strings).any())

    def put(self, sequence: Sequence) -> None:
        """Take a sequence that was given its slot and its pages."""
        self._new.append(sequence)

    def _write_new(self) -> None:
        """Write the sequences that came since the last call."""
        new, self._new = self._new, []
        if not new:
            return
        batch, params = self._next, [sequence.request.params for sequence in new]
        at = np.array([sequence.replica for sequence in new]), np.array([sequence.slot for sequence in new])
        batch.token[at] = [sequence.last_token for sequence in new]
        batch.position[at] = [sequence.position for sequence in new]
        batch.remaining[at] = [sequence.remaining for sequence in new]
        pages, stops = [sequence.pages for sequence in new], [one.stops for one in params]
        for array, lists, padding in ((batch.page_table, pages, NULL_PAGE), (batch.stop_ids, stops, -1)):
            columns = np.array([*itertools.zip_longest(*lists, fillvalue=padding)], np.int32)
            array[*at, : len(columns)] = columns.T
        batch.draw[at] = [(each.request.params.seed, each.request.prompt_id, each.generation_id) for each in new]
        batch.temperature[at] = [one.temperature for one in params]
        if batch.sampling.arrays():
            for sequence in new:
                batch.sampling.set((sequence.replica, sequence.slot), sequence)
        self._has_stop_tokens[at] = [bool(each) for each in stops]
        self.has_stop_strings[at] = [bool(one.stop) for one in params]
        self.sequences[at] = new

    def clear(self, at: Slot) -> None:
        """Make slots idle."""
        self._write_new()
        for array, idle in zip(self._next.arrays().values(), self._idle.arrays().values(), strict=True):
            array[at] = idle[0, 0]
        self._has_stop_tokens[at] = self.has_stop_strings[at] = False
        self.sequences[at] = None

    def advance(
        self, results: DecodeResults
    ) -> tuple[Int[np.ndarray, "replica slot"], Bool[np.ndarray, "replica slot"]]:
        """Move every sequence on by what it sampled.

        Returns:
            The number of tokens that each slot sampled, and whether the last of them is a stop token of the sequence.
        """
        self._write_new()
        batch, tokens = self._next, results.tokens
        counts = (tokens >= 0).sum(axis=-1, dtype=np.int32)
        last = np.take_along_axis(tokens, np.maximum(counts - 1, 0)[..., None], axis=-1)[..., 0]
        batch.sampling.extend_history(batch.position + 1, tokens)
        np.copyto(batch.token, last, where=counts > 0)
        np.add(batch.position, counts, out=batch.position)
        np.subtract(batch.remaining, counts, out=batch.remaining)
        return counts, (counts > 0) & (last[..., None] == batch.stop_ids).any(axis=-1)

    def batch(self, num_steps: int) -> DecodeBatch:
        """Return the arrays of a launch of ``num_steps``, which later changes leave as they are."""
        self._write_new()
        return self._next.copy(num_steps)
