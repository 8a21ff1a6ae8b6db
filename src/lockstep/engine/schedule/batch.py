"""Arguments of a launch, NumPy arrays whose shapes depend on the capacities alone, and its number of steps."""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int32, UInt32

from lockstep.engine.schedule.pages import NULL_PAGE
from lockstep.engine.schedule.sequence import Sequence

_VERIFY_WIDTHS = (8, 64)
_LAUNCH_COST = 4
"""The cost of a launch besides its steps, in steps: the host's work, gathering the context, the prefill of admitted
sequences. It is a guess: with true costs of 0.5 to 6, `num_decode_steps` comes within 5 % of the best fixed least
length at 8 to 256 slots, whether answers stop early or not; that is another one each time (benchmarks/admission.py).
"""


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
class Batch:
    """The arguments of a launch of any kind."""

    def arguments(self) -> dict[str, np.ndarray]:
        """Return every array by its name, each with an axis of replicas first."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def packed(self) -> Int32[np.ndarray, "replica word"]:
        """Return all arguments as one array: one transfer to a device."""
        arrays = self.arguments().values()
        return np.concatenate([array.reshape(len(array), array[0].size).view(np.int32) for array in arrays], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillBatch(Batch):
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
class CopyPagesBatch(Batch):
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
class PromptLogprobsBatch(Batch):
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
class SamplingBatch:
    """The sampling parameters of each slot besides seed and temperature. A feature that the program lacks is None."""

    top_k: Int32[np.ndarray, "replica slot"] | None
    """The number of most probable tokens to draw from; 0 keeps all tokens."""
    top_p: Float32[np.ndarray, "replica slot"] | None
    """The probability to keep; 1 keeps all tokens."""
    log_min_p: Float32[np.ndarray, "replica slot"] | None
    """The natural log of ``min_p``, computed on the host, the same in every layout; -inf keeps all tokens."""
    more_filters: Float32[np.ndarray, "replica slot filter"] | None
    """The value of each of the users' own filters, in the order of `Capacity.more_filters`; nan keeps all tokens."""
    stop_from: Int32[np.ndarray, "replica slot"] | None
    """The first position that a stop token may have."""
    history: Int32[np.ndarray, "replica slot length"] | None
    """The token ids of prompt and answer so far, padded with -1; nothing but -1 in slots without penalties."""
    prompt_length: Int32[np.ndarray, "replica slot"] | None
    """The number of tokens of the prompt."""
    penalties: Float32[np.ndarray, "replica slot 3"] | None
    """The repetition, presence and frequency penalties."""
    bias_ids: Int32[np.ndarray, "replica slot bias_ids"] | None
    """The token ids of ``logit_bias``, padded with -1."""
    bias: Float32[np.ndarray, "replica slot bias_ids"] | None
    """The bias of each of ``bias_ids``."""
    allowed_ids: Int32[np.ndarray, "replica slot allowed_ids"] | None
    """The token ids that may be sampled, padded with -1; nothing but -1 allows every token."""
    filter_names: tuple[str, ...] = ()
    """`Capacity.more_filters`."""

    @classmethod
    def empty(cls, capacity: Capacity) -> "SamplingBatch":
        """Return a batch with the neutral value in every slot."""
        slots = (capacity.replicas, capacity.slots)
        length = capacity.pages_per_sequence * capacity.page_size
        return cls(
            top_k=np.zeros(slots, np.int32) if capacity.filters else None,
            top_p=np.ones(slots, np.float32) if capacity.filters else None,
            log_min_p=np.full(slots, -np.inf, np.float32) if capacity.filters else None,
            more_filters=np.full((*slots, len(capacity.more_filters)), np.nan, np.float32)
            if capacity.more_filters
            else None,
            filter_names=capacity.more_filters,
            stop_from=np.zeros(slots, np.int32) if capacity.min_tokens else None,
            history=np.full((*slots, length), -1, np.int32) if capacity.penalties else None,
            prompt_length=np.zeros(slots, np.int32) if capacity.penalties else None,
            penalties=np.tile(np.array([1, 0, 0], np.float32), (*slots, 1)) if capacity.penalties else None,
            bias_ids=np.full((*slots, capacity.bias_ids), -1, np.int32) if capacity.bias_ids else None,
            bias=np.zeros((*slots, capacity.bias_ids), np.float32) if capacity.bias_ids else None,
            allowed_ids=np.full((*slots, capacity.allowed_ids), -1, np.int32) if capacity.allowed_ids else None,
        )

    def set(self, at: tuple[int, int], sequence: Sequence) -> None:
        """Write the parameters of a sequence."""
        params, prompt = sequence.request.params, sequence.request.prompt_tokens
        if params.has_filters:
            assert self.top_k is not None and self.top_p is not None and self.log_min_p is not None
            self.top_k[at] = min(params.top_k or 0, np.iinfo(np.int32).max)
            self.top_p[at] = params.top_p
            self.log_min_p[at] = math.log(params.min_p) if params.min_p > 0 else -np.inf
            for name, value in params.own_filters().items():
                assert self.more_filters is not None
                self.more_filters[at][self.filter_names.index(name)] = value
        if params.rules_out_stops:
            assert self.stop_from is not None
            self.stop_from[at] = len(prompt) + params.min_tokens
        if params.has_penalties:
            assert self.history is not None and self.prompt_length is not None and self.penalties is not None
            tokens = (*prompt, *sequence.tokens)
            self.history[at][: len(tokens)] = tokens
            self.prompt_length[at] = len(prompt)
            self.penalties[at] = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if params.logit_bias:
            assert self.bias_ids is not None and self.bias is not None
            for i, (token, bias) in enumerate(params.logit_bias):
                self.bias_ids[at][i], self.bias[at][i] = token, bias
        if params.allowed_token_ids is not None:
            assert self.allowed_ids is not None
            self.allowed_ids[at][: len(params.allowed_token_ids)] = params.allowed_token_ids

    def extend_history(self, start: Int32[np.ndarray, "replica slot"], tokens: Int32[np.ndarray, "..."]) -> None:
        """Append sampled tokens to the history of the slots with penalties.

        Args:
            start: The position of each slot's first token.
            tokens: The token ids ``[replica, slot, step]``, -1 after the last one of a slot.
        """
        if self.history is None:
            return
        replica, slot, step = np.nonzero((tokens >= 0) & (self.history[..., :1] >= 0))
        self.history[replica, slot, start[replica, slot] + step] = tokens[replica, slot, step]

    def copy(self) -> "SamplingBatch":
        """Return a copy of all arrays."""
        arrays: dict[str, Any] = {name: array.copy() for name, array in self.arrays().items()}
        return dataclasses.replace(self, **arrays)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the features that the program has, by field."""
        every = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: array for name, array in every.items() if isinstance(array, np.ndarray)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeBatch(Batch):
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
        """Return the arrays of slots by their names, those of ``sampling`` among them."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del own["num_steps"], own["sampling"]
        return own | self.sampling.arrays()

    def arguments(self) -> dict[str, np.ndarray]:
        """See `Batch.arguments`; the number of steps is repeated for each replica."""
        return {"num_steps": np.full(len(self.token), self.num_steps, np.int32), **self.arrays()}

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
class VerifyBatch(Batch):
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

    def arguments(self) -> dict[str, np.ndarray]:
        """See `Batch.arguments`."""
        return {**self.decode.arguments(), "drafts": self.drafts}


def num_decode_steps(remaining: Int[np.ndarray, " sequence"], limit: int, *, waiting: bool, stop_rate: float) -> int:
    """Return the number of steps of a launch; a pure function, so that every host computes the same.

    While no sequence waits, a launch is as long as its longest sequence. While sequences wait, a long launch leaves
    slots idle whose sequences have ended, and a short launch pays the cost of a launch again: of all lengths the one is
    chosen that is expected to sample the most tokens per step of cost; of equal ones the longest.

    Args:
        remaining: The number of tokens that each active sequence may still sample, each at least 1.
        waiting: Whether other sequences wait for a slot or pages.
        stop_rate: The part of the tokens that end their sequence before its last, as far as is known; 0 where none can.
    """
    longest = min(limit, int(remaining.max()))
    if not waiting:
        return longest
    # Nothing but additions, multiplications and divisions one after the other, which are exact to the last bit on every
    # CPU: another number of steps on one host would hang all of them.
    ended = np.bincount(np.minimum(remaining, longest), minlength=longest + 1)
    left = len(remaining) - np.cumsum(ended)[:longest]  # sequences with a token left at each step
    surviving = np.cumprod(np.full(longest, 1.0 - stop_rate)) if stop_rate else 1.0
    rates = np.cumsum(left * surviving) / (np.arange(1, longest + 1) + _LAUNCH_COST)
    return longest - int(np.argmax(rates[::-1]))
