"""Capacities, and batches of which nothing is used."""

import dataclasses

import numpy as np
import pytest

from lockstep.engine.schedule import NULL_PAGE, Capacity, CopyPagesBatch, DecodeBatch, PrefillBatch, PromptLogprobsBatch
from tests.unit.engine.schedule.test_scheduler import capacity_of


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
