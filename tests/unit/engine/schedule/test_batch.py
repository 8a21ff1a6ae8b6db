"""Capacities, batches of which nothing is used, the sampling parameters of slots, and the length of a launch."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.schedule import (
    NULL_PAGE,
    Capacity,
    CopyPagesBatch,
    DecodeBatch,
    PrefillBatch,
    PromptLogprobsBatch,
    SamplingBatch,
    sampling_sizes,
)
from lockstep.engine.schedule.batch import num_decode_steps
from lockstep.engine.schedule.sequence import Sequence
from tests.unit.engine.schedule.test_scheduler import capacity_of, request


@pytest.mark.parametrize(("replicas", "idle", "active"), [(4, 0, [0, 1, 2, 3]), (4, 2, [0, 2]), (6, 4, [0, 3])])
def test_active_replicas_are_evenly_spaced(replicas: int, idle: int, active: list[int]) -> None:
    assert list(capacity_of(replicas=replicas, idle_replicas=idle).active_replicas) == active


def test_what_no_request_asks_for_has_no_room() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Capacity)}
    optional = {name: value for name, value in fields.items() if value is not dataclasses.MISSING}
    assert len(optional) > 8 and not any(optional.values()), optional


def test_fewer_slots_have_room_for_fewer_sequences() -> None:
    capacity = capacity_of(replicas=4, idle_replicas=2, slots=8, sequences=15)
    assert capacity.with_slots(3) == dataclasses.replace(capacity, slots=3, sequences=6)
    assert capacity.with_slots(8).sequences == 15, "more slots do not make more sequences"


def test_an_empty_prefill_writes_to_the_null_page_alone() -> None:
    batch = PrefillBatch.empty(capacity_of(replicas=2, prefill_rows=3, page_size=4, pages_per_sequence=5))
    assert (batch.page == NULL_PAGE).all() and (batch.page_table == NULL_PAGE).all()
    assert batch.tokens.shape == (2, 3, 4) and batch.page_table.shape == (2, 3, 5)


def test_an_empty_copy_copies_the_null_page_to_itself() -> None:
    batch = CopyPagesBatch.empty(capacity_of(replicas=2, slots=3))
    assert batch.source.shape == batch.target.shape == (2, 3)
    assert (batch.source == NULL_PAGE).all() and (batch.target == NULL_PAGE).all()


def test_an_empty_batch_of_prompt_logprobs_has_no_targets() -> None:
    batch = PromptLogprobsBatch.empty(capacity_of(replicas=2, prefill_rows=3, page_size=4))
    assert batch.targets.shape == (2, 3, 4) and (batch.targets == -1).all()


def test_an_empty_decode_has_idle_slots_that_no_token_stops() -> None:
    batch = DecodeBatch.empty(capacity_of(replicas=2, slots=3, stop_ids=2), 7)
    assert batch.num_steps == 7 and batch.remaining.shape == (2, 3) and not batch.remaining.any()
    assert (batch.stop_ids == -1).all() and (batch.page_table == NULL_PAGE).all()
    assert batch.draw.dtype == np.uint32 and batch.temperature.dtype == np.float32


def batch_with(**params: Any) -> tuple[SamplingBatch, Sequence]:
    """A batch of one replica with two slots, and a sequence with one sampled token in the second slot."""
    sequence = Sequence(request=request(0, 3, 8, **params), generation_id=0)
    sequence.extend(np.array([[9], [0], [0]], np.int32))
    capacity = capacity_of(slots=2, page_size=4, pages_per_sequence=2, **sampling_sizes([sequence.request.params]))
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


@given(st.lists(st.integers(1, 300), min_size=1, max_size=70), st.integers(1, 128), st.booleans(), st.floats(0, 0.9))
def test_a_launch_is_as_long_as_is_best(remaining: list[int], limit: int, waiting: bool, stop_rate: float) -> None:
    steps = num_decode_steps(np.array(remaining), limit, waiting=waiting, stop_rate=stop_rate)
    assert 1 <= steps <= min(limit, max(remaining))
    assert steps == num_decode_steps(np.array(remaining[::-1]), limit, waiting=waiting, stop_rate=stop_rate)
    if not waiting:
        assert steps == min(limit, max(remaining))
        return

    def rate(length: int) -> float:
        tokens = sum((1 - stop_rate) ** step for left in remaining for step in range(min(left, length)))
        return tokens / (length + 4)

    best = max(rate(length) for length in range(1, min(limit, max(remaining)) + 1))
    assert np.isclose(rate(steps), best)


def test_one_short_sequence_does_not_end_the_launch_of_many_long_ones() -> None:
    assert num_decode_steps(np.array([1, *[64] * 63]), 64, waiting=True, stop_rate=0.0) == 64
    assert num_decode_steps(np.array([*[4] * 63, 64]), 64, waiting=True, stop_rate=0.0) == 4


def test_the_more_sequences_stop_by_themselves_the_shorter_is_a_launch_while_others_wait() -> None:
    lengths = [num_decode_steps(np.array([64] * 64), 64, waiting=True, stop_rate=1 / n) for n in (1000, 100, 20, 4)]
    assert lengths[0] == 64 and lengths == sorted(lengths, reverse=True) and lengths[-1] < 8
    assert num_decode_steps(np.array([64] * 64), 64, waiting=False, stop_rate=0.25) == 64
