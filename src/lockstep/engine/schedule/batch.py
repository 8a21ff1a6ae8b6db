"""Arguments of a launch, NumPy arrays whose shapes depend on the capacities alone; and the slots they are kept in."""

import dataclasses
import itertools
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, UInt32

from lockstep.engine.schedule.pages import NULL_PAGE
from lockstep.engine.schedule.sampling import SamplingBatch
from lockstep.engine.schedule.sequence import DecodeResults, Sequence

_VERIFY_WIDTHS = (8, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Every capacity that the scheduler and the programs share."""

    replicas: int  # number of replicas, groups of devices that can decode different sequences
    sequences: int  # the most sequences decoded at a time, over all replicas
    slots: int  # the most sequences decoded at a time by one replica
    page_size: int
    pages: int  # number of pages in one replica's pool, the null page included
    pages_per_sequence: int  # the width of a page table; a sequence has at most `pages_per_sequence * page_size` tokens
    prefill_rows: int  # number of pages of prompt tokens that one replica prefills in a launch
    steps: int  # the most steps of a decode launch, each a token per sequence
    stop_ids: int
    filters: int = 0  # 1 where the decode program has top-k, top-p and min-p; 0 leaves them out
    penalties: int = 0  # 1 where the decode program counts tokens, for penalties; 0 leaves that out
    min_tokens: int = 0  # 1 where the decode program rules out stop tokens at first; 0 leaves that out
    bias_ids: int = 0  # the most entries of a sequence's `logit_bias`; 0 leaves the bias out
    allowed_ids: int = 0  # the most entries of a sequence's `allowed_token_ids`; 0 leaves them out
    top_logprobs: int = 0  # number of most probable tokens that the decode program reports per step; 0 for none
    prompt_logprobs: int = 0  # 1 where there is a program for the log-probabilities of prompt tokens; 0 leaves it out
    routed_experts: int = 0  # 1 where programs report the experts of each token; 0 leaves them out
    page_copies: int = 0  # 1 where there is a program that copies partial pages of prompts; 0 leaves it out
    prefill_sequences: int = 0  # the most sequences that one replica prefills in a launch; 0 for any number
    idle_replicas: int = 0  # number of replicas that are given no sequences; the others are evenly spaced
    draft_tokens: int = 0  # the most tokens of a sequence that a launch verifies; 0: no programs that verify
    more_filters: tuple[str, ...] = ()  # the names of the users' own filters that the decode program has, sorted

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The positions of a sequence that a step verifies, one number for each program, in rising order.

        A few at a time where some of a draft is right, and as many as in a prefill where all of it is.
        """
        return tuple(sorted({min(width, self.draft_tokens) for width in _VERIFY_WIDTHS} - {0, 1}))

    @property
    def active_replicas(self) -> range:
        """The indices of the replicas that are given sequences."""
        return range(0, self.replicas, self.replicas // (self.replicas - self.idle_replicas))

    def at_least(self, least: "Capacity") -> "Capacity":
        """This capacity with nothing smaller than in another one."""

        def larger(new: Any, old: Any) -> Any:
            return tuple(sorted({*new, *old})) if isinstance(new, tuple) else max(new, old)

        names = [field.name for field in dataclasses.fields(self)]
        return Capacity(**{name: larger(getattr(self, name), getattr(least, name)) for name in names})

    def with_slots(self, slots: int) -> "Capacity":
        """This capacity with ``slots`` per replica, and no more sequences than they have room for."""
        sequences = min(self.sequences, slots * len(self.active_replicas))
        return dataclasses.replace(self, slots=slots, sequences=sequences)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillBatch:
    """Pages of prompt tokens to compute K/V for. An unused row writes to the null page."""

    tokens: Int32[np.ndarray, "replica row page_size"]
    """The token ids."""
    start: Int32[np.ndarray, "replica row"]
    """The position of the row's first token, a multiple of the page size."""
    page: Int32[np.ndarray, "replica row"]
    """The page that the row's K/V is written to."""
    page_table: Int32[np.ndarray, "replica row pages_per_sequence"]
    """The pages of the row's sequence, in order."""
    slot: Int32[np.ndarray, "replica row"]
    """The slot of the row's sequence."""
    count: Int32[np.ndarray, "replica row"]
    """The number of the row's tokens that decode does not read again; 0 for an unused row."""

    @classmethod
    def empty(cls, capacity: Capacity) -> "PrefillBatch":
        """Return a batch whose rows are all unused."""
        rows = (capacity.replicas, capacity.prefill_rows)
        return cls(
            tokens=np.zeros((*rows, capacity.page_size), np.int32),
            start=np.zeros(rows, np.int32),
            page=np.full(rows, NULL_PAGE, np.int32),
            page_table=np.full((*rows, capacity.pages_per_sequence), NULL_PAGE, np.int32),
            slot=np.zeros(rows, np.int32),
            count=np.zeros(rows, np.int32),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CopyPagesBatch:
    """Pages to copy. An unused entry copies the null page to itself."""

    source: Int32[np.ndarray, "replica slot"]
    """The page to copy from."""
    target: Int32[np.ndarray, "replica slot"]
    """The page to copy to."""

    @classmethod
    def empty(cls, capacity: Capacity) -> "CopyPagesBatch":
        """Return a batch that copies nothing."""
        shape = (capacity.replicas, capacity.slots)
        return cls(source=np.full(shape, NULL_PAGE, np.int32), target=np.full(shape, NULL_PAGE, np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptLogprobsBatch:
    """Pages of prompt tokens, all with K/V in the pool, to compute log-probabilities for."""

    tokens: Int32[np.ndarray, "replica row page_size"]
    """The token ids."""
    targets: Int32[np.ndarray, "replica row page_size"]
    """The token id that follows each token; -1 where there is none, and throughout an unused row."""
    start: Int32[np.ndarray, "replica row"]
    """The position of the row's first token, a multiple of the page size."""
    page_table: Int32[np.ndarray, "replica row pages_per_sequence"]
    """The pages, in order, of a sequence that has the prompt."""

    @classmethod
    def empty(cls, capacity: Capacity) -> "PromptLogprobsBatch":
        """Return a batch whose rows are all unused."""
        rows = (capacity.replicas, capacity.prefill_rows)
        return cls(
            tokens=np.zeros((*rows, capacity.page_size), np.int32),
            targets=np.full((*rows, capacity.page_size), -1, np.int32),
            start=np.zeros(rows, np.int32),
            page_table=np.full((*rows, capacity.pages_per_sequence), NULL_PAGE, np.int32),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeBatch:
    """Sequences to decode, one per slot. An idle slot has ``remaining`` 0."""

    num_steps: int
    """The number of steps of the launch."""
    token: Int32[np.ndarray, "replica slot"]
    """The token id that the first step reads."""
    position: Int32[np.ndarray, "replica slot"]
    """The position of ``token``."""
    remaining: Int32[np.ndarray, "replica slot"]
    """The most tokens that may still be sampled."""
    page_table: Int32[np.ndarray, "replica slot pages_per_sequence"]
    """The pages of the sequence, in order."""
    stop_ids: Int32[np.ndarray, "replica slot stop_ids"]
    """The token ids that end the sequence, padded with -1."""
    draw: UInt32[np.ndarray, "replica slot 3"]
    """The seed, prompt number and generation number: with position and token, all that a random draw depends on."""
    temperature: Float32[np.ndarray, "replica slot"]
    """The temperature; 0 is greedy."""
    sampling: SamplingBatch
    """The other sampling parameters."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every array by its name, those of ``sampling`` among them."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del own["num_steps"], own["sampling"]
        return own | self.sampling.arrays()

    def copy(self, num_steps: int) -> "DecodeBatch":
        """Return a launch of ``num_steps`` with copies of the arrays."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        copies: dict[str, Any] = {name: array.copy() for name, array in own.items() if isinstance(array, np.ndarray)}
        return dataclasses.replace(self, num_steps=num_steps, sampling=self.sampling.copy(), **copies)

    @classmethod
    def empty(cls, capacity: Capacity, num_steps: int) -> "DecodeBatch":
        """Return a batch whose slots are all idle."""
        slots = (capacity.replicas, capacity.slots)
        return cls(
            num_steps=num_steps,
            token=np.zeros(slots, np.int32),
            position=np.zeros(slots, np.int32),
            remaining=np.zeros(slots, np.int32),
            page_table=np.full((*slots, capacity.pages_per_sequence), NULL_PAGE, np.int32),
            stop_ids=np.full((*slots, capacity.stop_ids), -1, np.int32),
            draw=np.zeros((*slots, 3), np.uint32),
            temperature=np.zeros(slots, np.float32),
            sampling=SamplingBatch.empty(capacity),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VerifyBatch:
    """Sequences to decode with drafts: a step samples one token more than there are right ones next in the draft."""

    decode: DecodeBatch
    """The sequences; its ``num_steps`` times ``width`` is at most the capacity's ``draft_tokens``."""
    width: int
    """The positions of a sequence in each step, which select the program."""
    drafts: Int32[np.ndarray, "replica slot draft_tokens"]
    """A guess at the next tokens of each sequence, -1 where there is none."""

    @classmethod
    def empty(cls, capacity: Capacity, width: int, num_steps: int) -> "VerifyBatch":
        """Return a batch whose slots are all idle."""
        shape = (capacity.replicas, capacity.slots, capacity.draft_tokens)
        return cls(decode=DecodeBatch.empty(capacity, num_steps), width=width, drafts=np.full(shape, -1, np.int32))


type Slot = tuple[int, int] | tuple[np.ndarray, np.ndarray]
"""A replica and a slot, or as many replicas and slots."""


class DecodeSlots:
    """The next decode batch. A sequence is written with all others that got a slot since the last launch, and then
    moves on with each launch.
    """

    def __init__(self, capacity: Capacity) -> None:
        single = dataclasses.replace(capacity, replicas=1, idle_replicas=0, slots=1, sequences=1)
        self._next = DecodeBatch.empty(capacity, 0)
        self._new: list[Sequence] = []
        self._idle = DecodeBatch.empty(single, 0)
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
        pages, stops = [sequence.pages for sequence in new], [rules.stops for rules in params]
        for array, lists, padding in ((batch.page_table, pages, NULL_PAGE), (batch.stop_ids, stops, -1)):
            columns = np.array([*itertools.zip_longest(*lists, fillvalue=padding)], np.int32)
            array[*at, : len(columns)] = columns.T
        batch.draw[at] = [
            (sequence.request.params.seed, sequence.request.prompt_id, sequence.generation_id) for sequence in new
        ]
        batch.temperature[at] = [rules.temperature for rules in params]
        if batch.sampling.arrays():
            for sequence in new:
                batch.sampling.set((sequence.replica, sequence.slot), sequence)
        self._has_stop_tokens[at] = [bool(stop_ids) for stop_ids in stops]
        self.has_stop_strings[at] = [bool(rules.stop) for rules in params]
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
