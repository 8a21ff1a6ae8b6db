"""Fixed-shape arrays that tell a device program what to do. Shapes depend on the sizes alone, never on the requests."""

import dataclasses

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from lockstep.schedule.pages import NULL_PAGE
from lockstep.schedule.sampling import SamplingBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Every capacity that the scheduler and the programs share.

    Args:
        replicas: groups of devices that can decode different sequences.
        sequences: sequences decoded at a time over all replicas.
        slots: sequences that one replica decodes at a time.
        page_size: tokens in a page.
        pages: pages in one replica's pool, the null page included.
        pages_per_sequence: width of a page table; a sequence has at most ``pages_per_sequence * page_size`` tokens.
        prefill_rows: pages of prompt tokens that one replica prefills in a launch.
        steps: tokens that a decode launch samples per sequence at most.
        stop_ids: stop tokens per sequence at most.
        penalties: 1 where the decode program counts tokens, for penalties; 0 leaves that out.
        min_tokens: 1 where the decode program rules out stop tokens at first; 0 leaves that out.
        bias_ids: entries of a sequence's logit_bias at most; 0 leaves it out.
        allowed_ids: entries of a sequence's allowed_token_ids at most; 0 leaves them out.
        top_logprobs: most probable tokens that the decode program reports per step; 0 for none.
        prompt_logprobs: 1 where there is a program for the log-probabilities of prompt tokens; 0 leaves it out.
        page_copies: 1 where there is a program that copies partial pages of prompts; 0 leaves it out.
        prefill_sequences: whose prompts one replica prefills in a launch at most; 0 for any number.
        idle_replicas: replicas that are given no sequences; the others are evenly spaced.
    """

    replicas: int
    sequences: int
    slots: int
    page_size: int
    pages: int
    pages_per_sequence: int
    prefill_rows: int
    steps: int
    stop_ids: int
    penalties: int = 0
    min_tokens: int = 0
    bias_ids: int = 0
    allowed_ids: int = 0
    top_logprobs: int = 0
    prompt_logprobs: int = 0
    page_copies: int = 0
    prefill_sequences: int = 0
    idle_replicas: int = 0

    @property
    def active_replicas(self) -> range:
        """The replicas that sequences are given to."""
        return range(0, self.replicas, self.replicas // (self.replicas - self.idle_replicas))

    def with_slots(self, slots: int) -> "Capacity":
        """This capacity with ``slots`` per replica, and no more sequences than they have room for."""
        sequences = min(self.sequences, slots * len(self.active_replicas))
        return dataclasses.replace(self, slots=slots, sequences=sequences)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillBatch:
    """Pages of prompt tokens to compute K/V for. An unused row has length 0 and points to the null page."""

    tokens: Int32[np.ndarray, "replica row page_size"]
    start: Int32[np.ndarray, "replica row"]
    """Position of the row's first token, a multiple of the page size."""
    page: Int32[np.ndarray, "replica row"]
    """Page that the row's K/V is written to."""
    page_table: Int32[np.ndarray, "replica row pages_per_sequence"]
    """Pages of the row's sequence."""

    @classmethod
    def empty(cls, sizes: Capacity) -> "PrefillBatch":
        """A plan whose rows are all unused."""
        rows = (sizes.replicas, sizes.prefill_rows)
        return cls(
            tokens=np.zeros((*rows, sizes.page_size), np.int32),
            start=np.zeros(rows, np.int32),
            page=np.full(rows, NULL_PAGE, np.int32),
            page_table=np.full((*rows, sizes.pages_per_sequence), NULL_PAGE, np.int32),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CopyPagesBatch:
    """Pages to copy. An unused entry copies the null page to itself."""

    source: Int32[np.ndarray, "replica slot"]
    target: Int32[np.ndarray, "replica slot"]

    @classmethod
    def empty(cls, sizes: Capacity) -> "CopyPagesBatch":
        """A plan that copies nothing."""
        shape = (sizes.replicas, sizes.slots)
        return cls(source=np.full(shape, NULL_PAGE, np.int32), target=np.full(shape, NULL_PAGE, np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptLogprobsBatch:
    """Pages of prompt tokens, all with K/V in the pool, to compute log-probabilities for."""

    tokens: Int32[np.ndarray, "replica row page_size"]
    targets: Int32[np.ndarray, "replica row page_size"]
    """The token that follows each, -1 where there is none; an unused row has none."""
    start: Int32[np.ndarray, "replica row"]
    """Position of the row's first token, a multiple of the page size."""
    page_table: Int32[np.ndarray, "replica row pages_per_sequence"]
    """Pages of a sequence that has the prompt."""

    @classmethod
    def empty(cls, sizes: Capacity) -> "PromptLogprobsBatch":
        """A plan whose rows are all unused."""
        rows = (sizes.replicas, sizes.prefill_rows)
        return cls(
            tokens=np.zeros((*rows, sizes.page_size), np.int32),
            targets=np.full((*rows, sizes.page_size), -1, np.int32),
            start=np.zeros(rows, np.int32),
            page_table=np.full((*rows, sizes.pages_per_sequence), NULL_PAGE, np.int32),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeBatch:
    """Sequences to decode ``num_steps`` tokens of. An idle slot has ``remaining`` 0."""

    num_steps: int
    token: Int32[np.ndarray, "replica slot"]
    position: Int32[np.ndarray, "replica slot"]
    remaining: Int32[np.ndarray, "replica slot"]
    page_table: Int32[np.ndarray, "replica slot pages_per_sequence"]
    stop_ids: Int32[np.ndarray, "replica slot stop_ids"]
    """Padded with -1."""
    draw: UInt32[np.ndarray, "replica slot 3"]
    """Seed, prompt and generation: with the position, all that a random draw depends on."""
    temperature: Float32[np.ndarray, "replica slot"]
    sampling: SamplingBatch

    @classmethod
    def empty(cls, sizes: Capacity, num_steps: int) -> "DecodeBatch":
        """A plan whose slots are all idle."""
        slots = (sizes.replicas, sizes.slots)
        return cls(
            num_steps=num_steps,
            token=np.zeros(slots, np.int32),
            position=np.zeros(slots, np.int32),
            remaining=np.zeros(slots, np.int32),
            page_table=np.full((*slots, sizes.pages_per_sequence), NULL_PAGE, np.int32),
            stop_ids=np.full((*slots, sizes.stop_ids), -1, np.int32),
            draw=np.zeros((*slots, 3), np.uint32),
            temperature=np.zeros(slots, np.float32),
            sampling=SamplingBatch.empty(sizes),
        )
