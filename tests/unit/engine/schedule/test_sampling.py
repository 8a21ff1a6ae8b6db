"""Which sampling features programs need, and the parameters of each slot."""

import dataclasses
import math
from typing import Any

import numpy as np

from lockstep.engine.schedule import sampling_sizes
from lockstep.engine.schedule.sampling import SamplingBatch
from lockstep.engine.schedule.sequence import Sequence
from lockstep.types import SamplingParams
from tests.unit.engine.schedule.test_scheduler import capacity_of, request


def test_what_a_request_needs_of_the_program() -> None:
    names = ("filters", "penalties", "min_tokens", "bias_ids", "allowed_ids", "top_logprobs", "prompt_logprobs")
    none = dict.fromkeys((*names, "routed_experts"), 0)
    assert sampling_sizes([]) == none
    filtered = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    for greedy in (SamplingParams(max_new_tokens=8, stop_token_ids=(1,)), SamplingParams(max_new_tokens=8, **filtered)):
        assert sampling_sizes([greedy]) == none  # a greedy answer draws from no distribution
    for name, value in filtered.items():
        assert sampling_sizes([SamplingParams(max_new_tokens=8, temperature=1.0, **{name: value})])["filters"] == 1
    neutral = SamplingParams(max_new_tokens=8, temperature=1.0, stop_token_ids=(1,))
    assert sampling_sizes([neutral]) == none
    lists = SamplingParams(max_new_tokens=8, logit_bias=((1, 1.0),), allowed_token_ids=tuple(range(9)))
    counts = SamplingParams(max_new_tokens=8, frequency_penalty=0.5, min_tokens=2, stop_token_ids=(1,), top_logprobs=3)
    counts = dataclasses.replace(counts, prompt_logprobs=True, routed_experts=True)
    assert sampling_sizes([lists, neutral, counts]) == {
        "filters": 0,
        "penalties": 1,
        "min_tokens": 1,
        "bias_ids": 8,
        "allowed_ids": 16,
        "top_logprobs": 3,
        "prompt_logprobs": 1,
        "routed_experts": 1,
    }
    # Where no stop token ends an answer there is none to rule out.
    assert not any(sampling_sizes([SamplingParams(max_new_tokens=8, min_tokens=2)]).values())


def batch_with(**params: Any) -> tuple[SamplingBatch, Sequence]:
    """A batch of one replica with two slots, and a sequence with one sampled token in the second slot."""
    one = request(0, 3, 8, **params)
    sequence = Sequence(request=one, generation_id=0)
    sequence.extend(np.array([[9], [0], [0]], np.int32))
    capacity = capacity_of(slots=2, page_size=4, pages_per_sequence=2, **sampling_sizes([one.params]))
    batch = SamplingBatch.empty(capacity)
    batch.set((0, 1), sequence)
    return batch, sequence


def test_a_batch_has_the_arrays_of_the_features_that_its_program_has() -> None:
    assert not batch_with()[0].arrays()
    batch, _ = batch_with(temperature=1.0, min_p=0.1)
    assert list(batch.arrays()) == ["top_k", "top_p", "log_min_p"]


def test_a_neutral_filter_keeps_every_token() -> None:
    batch, _ = batch_with(temperature=1.0, top_p=0.5)
    assert (batch.top_k[0, 1], batch.top_p[0, 0], batch.log_min_p[0, 1]) == (0, 1.0, -np.inf)


def test_filters_are_set_in_their_slot_alone() -> None:
    batch, _ = batch_with(temperature=1.0, top_k=5, top_p=0.5, min_p=0.25)
    assert batch.top_k.tolist() == [[0, 5]] and batch.top_p.tolist() == [[1.0, 0.5]]
    np.testing.assert_array_equal(batch.log_min_p, np.array([[-np.inf, math.log(0.25)]], np.float32))


def test_a_top_k_beyond_32_bits_keeps_every_token() -> None:
    batch, _ = batch_with(temperature=1.0, top_k=2**40)
    assert batch.top_k[0, 1] == 2**31 - 1


def test_the_first_position_of_a_stop_token_counts_the_prompt() -> None:
    batch, _ = batch_with(stop_token_ids=(1,), min_tokens=2)
    assert batch.stop_from is not None and batch.stop_from.tolist() == [[0, 3 + 2]]


def test_penalties_see_prompt_and_answer() -> None:
    batch, sequence = batch_with(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=-0.5)
    assert batch.history is not None and batch.penalties is not None and batch.prompt_length is not None
    assert batch.history[0, 1].tolist() == [*sequence.request.prompt_tokens, 9, -1, -1, -1, -1]
    assert batch.penalties.tolist() == [[[1.0, 0.0, 0.0], [1.5, 0.25, -0.5]]] and batch.prompt_length[0, 1] == 3


def test_lists_are_padded_with_no_token() -> None:
    batch, _ = batch_with(logit_bias=((4, 2.0),), allowed_token_ids=(4, 6))
    assert batch.bias_ids is not None and batch.bias is not None and batch.allowed_ids is not None
    assert batch.bias_ids[0, 1].tolist() == [4] + [-1] * 7 and batch.bias[0, 1, 0] == 2.0
    assert batch.allowed_ids[0, 1].tolist() == [4, 6] + [-1] * 6


def test_all_sampled_tokens_go_on_with_the_history_of_a_slot_with_penalties() -> None:
    """A prompt of one token too; a slot without a sequence keeps none."""
    batch = SamplingBatch.empty(capacity_of(slots=2, page_size=4, pages_per_sequence=2, penalties=1))
    batch.set((0, 1), Sequence(request=request(0, 1, 8, frequency_penalty=0.5), generation_id=0))
    assert batch.history is not None
    first = batch.history[0, 1, 0]
    batch.extend_history(np.array([[0, 1]], np.int32), np.array([[[3, 4], [5, 6]]], np.int32))
    assert batch.history[0].tolist() == [[-1] * 8, [first, 5, 6, *[-1] * 5]]
