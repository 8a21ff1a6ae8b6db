"""The sampling parameters of each slot as arrays, and which of the features a decode program has."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from lockstep.engine.schedule.sequence import Sequence
from lockstep.types import SamplingParams

_LEAST_WIDTH = 8
"""The least number of entries of a padded list."""


def sampling_sizes(params: Iterable[SamplingParams]) -> dict[str, int]:
    """Return the fields of `Capacity` that say which sampling features the programs need; 0 leaves a feature out."""
    sizes = {"filters": 0, "penalties": 0, "min_tokens": 0, "bias_ids": 0, "allowed_ids": 0}
    sizes |= {"top_logprobs": 0, "prompt_logprobs": 0, "routed_experts": 0}
    for rules in params:
        needed = {
            "filters": int(rules.has_filters),
            "penalties": int(rules.has_penalties),
            "min_tokens": int(rules.rules_out_stops),
            "bias_ids": _round_up(len(rules.logit_bias)),
            "allowed_ids": _round_up(len(rules.allowed_token_ids or ())),
            "top_logprobs": rules.top_logprobs,
            "prompt_logprobs": int(rules.prompt_logprobs),
            "routed_experts": int(rules.routed_experts),
        }
        sizes = {name: max(size, needed[name]) for name, size in sizes.items()}
    return sizes


def _round_up(width: int) -> int:
    """Round up to a power of two, so that lists of other lengths seldom need other programs."""
    return max(_LEAST_WIDTH, 1 << (width - 1).bit_length()) if width else 0


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
    def empty(cls, capacity: Any) -> "SamplingBatch":
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
