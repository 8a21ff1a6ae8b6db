"""Capacities, batches of which nothing is used, and the slots: what a sequence writes, and how it moves on."""

import dataclasses

import numpy as np
import pytest

from lockstep.engine.schedule import (
    NULL_PAGE,
    Capacity,
    CopyPagesBatch,
    DecodeBatch,
    DecodeResults,
    PrefillBatch,
    PromptLogprobsBatch,
)
from lockstep.engine.schedule.batch import DecodeSlots
from lockstep.engine.schedule.replica import Replica
from lockstep.engine.schedule.sampling import sampling_sizes
from lockstep.engine.schedule.sequence import Sequence
from lockstep.types import Request
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


def slots_with(capacity: Capacity, *requests: Request) -> DecodeSlots:
    """One replica with the requests in its slots, in order."""
    replica, slots = Replica(0, capacity), DecodeSlots(capacity)
    for one in requests:
        sequence = Sequence(request=one, generation_id=0)
        replica.admit(sequence)
        slots.put(sequence)
    return slots


def results_of(*rows: list[int]) -> DecodeResults:
    tokens = np.array([rows], np.int32)
    return DecodeResults.of(tokens, np.zeros(tokens.shape, np.float32))


def test_a_batch_reads_the_last_token_at_its_position() -> None:
    capacity = capacity_of(page_size=4, stop_ids=2)
    first = request(5, (7, 8), 3, stop_token_ids=(1,), seed=9, temperature=0.5)
    slots = slots_with(capacity, first, request(6, 1, 6))
    batch = slots.batch(4)
    assert batch.num_steps == 4 and slots.remaining.tolist() == [3, 6]
    assert batch.token[0, :2].tolist() == [8, 0] and batch.position[0, :2].tolist() == [1, 0]
    assert batch.remaining[0].tolist() == [3, 6, 0, 0] and batch.stop_ids[0, 0].tolist() == [1, -1]
    assert batch.draw[0, 0].tolist() == [9, 5, 0] and batch.temperature[0, 0] == 0.5
    assert batch.page_table[0, :2, :3].tolist() == [[1, 0, 0], [2, 3, 0]]


@pytest.mark.parametrize(("options", "may_stop"), [({}, False), ({"stop_token_ids": (1, 2)}, True)])
def test_stop_tokens_that_are_ignored_end_nothing(options: dict[str, tuple[int, ...]], may_stop: bool) -> None:
    assert slots_with(capacity_of(), request(0, 1, 2, **options)).may_stop == may_stop
    slots = slots_with(capacity_of(), request(0, 1, 2, ignore_eos=True, **options))
    assert slots.batch(1).stop_ids[0, 0].tolist() == [-1, -1] and not slots.may_stop


def test_a_stop_string_may_end_a_sequence_too() -> None:
    assert slots_with(capacity_of(), request(0, 1, 2, stop=("x",))).may_stop


def test_what_was_sampled_is_read_next() -> None:
    slots = slots_with(capacity_of(slots=3), request(0, 3, 4, stop_token_ids=(9,)), request(1, 3, 4))
    before = slots.batch(3)
    counts, stopped = slots.advance(results_of([5, 9, -1], [6, 9, 7], [-1, -1, -1]))
    after = slots.batch(3)
    assert counts.tolist() == [[2, 3, 0]] and stopped.tolist() == [[True, False, False]]
    assert after.token[0].tolist() == [9, 7, 0] and after.position[0].tolist() == [4, 5, 0]
    assert after.remaining[0].tolist() == [2, 1, 0]
    assert before.token[0].tolist() == [2, 2, 0] and before.remaining[0].tolist() == [4, 4, 0], "a batch never changes"


def test_penalties_see_what_was_sampled() -> None:
    first, second = request(0, 3, 5), request(1, (5, 6), 5, presence_penalty=0.5)
    capacity = capacity_of(slots=2, page_size=4, pages_per_sequence=2, **sampling_sizes([first.params, second.params]))
    slots = slots_with(capacity, first, second)
    slots.advance(results_of([1, 2, 3], [3, 4, -1]))
    slots.advance(results_of([1, -1, -1], [7, -1, -1]))
    history = slots.batch(1).sampling.history
    assert history is not None
    assert history[0].tolist() == [[-1] * 8, [5, 6, 3, 4, 7, -1, -1, -1]]


def test_a_cleared_slot_is_as_it_was_at_first() -> None:
    everything = request(
        0, 3, 4, stop_token_ids=(1,), min_tokens=1, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1,
        presence_penalty=0.5, logit_bias=((1, 1.0),), allowed_token_ids=(1, 2), seed=3,
    )  # fmt: skip
    capacity = capacity_of(slots=2, **sampling_sizes([everything.params]))
    slots = slots_with(capacity, everything, everything)
    used, empty = slots.batch(0).arrays(), DecodeBatch.empty(capacity, 0).arrays()
    assert not [name for name in used if np.array_equal(used[name], empty[name])]
    slots.clear((0, 0))
    half = slots.batch(0).arrays()
    for name in half:
        np.testing.assert_array_equal(half[name][0, 0], empty[name][0, 0])
        np.testing.assert_array_equal(half[name][0, 1], used[name][0, 1])
    slots.clear((np.array([0]), np.array([1])))
    for name, array in slots.batch(0).arrays().items():
        np.testing.assert_array_equal(array, empty[name])
    assert not slots.may_stop and slots.remaining.tolist() == []
