"""The slots, pages and prefill queue of one replica, and the batches of all of them."""

import numpy as np
import pytest

from lockstep.engine.schedule import Capacity, DecodeBatch, DecodeResults, sampling_sizes
from lockstep.engine.schedule.pages import page_keys, tail_key
from lockstep.engine.schedule.replica import DecodeSlots, Replica, prefill_batch, prompt_logprobs_batch
from lockstep.engine.schedule.sequence import PromptLogprobs, Sequence
from lockstep.types import Request
from tests.unit.engine.schedule.placements import fits, num_shared_tokens
from tests.unit.engine.schedule.test_scheduler import capacity_of, request

PAGE = 2


def sequence_of(number: int, prompt: int | tuple[int, ...], new: int = 1, generation: int = 0) -> Sequence:
    one = request(number, prompt, new)
    known = one.prompt_tokens[:-1]
    keys = page_keys(known, PAGE)
    return Sequence(request=one, generation_id=generation, prefix_keys=keys, tail_key=tail_key(known, PAGE, keys))


def replica_of(**values: int) -> Replica:
    return Replica(3, capacity_of(page_size=PAGE, **values))


def test_a_sequence_gets_a_slot_and_the_pages_of_its_worst_case() -> None:
    replica, sequence = replica_of(pages=10), sequence_of(0, 4, new=4)
    replica.admit(sequence)
    assert (sequence.replica, sequence.slot, len(sequence.pages)) == (3, 0, 4)
    assert replica.allocator.num_free == 9 - 4 and replica.busy and replica.prefilling


def test_without_a_slot_nothing_fits() -> None:
    replica = replica_of(slots=1)
    replica.admit(sequence_of(0, 1))
    assert replica.num_free_slots == 0 and not fits(replica, sequence_of(1, 1))


def test_pages_that_others_have_need_not_be_free() -> None:
    replica = replica_of(pages=5)
    replica.admit(sequence_of(0, 5, new=2))  # two full prompt pages and one of its own
    assert replica.allocator.num_free == 1
    assert fits(replica, sequence_of(1, 5, new=2)) and not fits(replica, sequence_of(1, (9, 9, 9, 9, 9), new=2))


def test_full_pages_of_a_common_beginning_are_shared_and_prefilled_once() -> None:
    replica, first, second = replica_of(), sequence_of(0, 5), sequence_of(1, (0, 1, 2, 3, 9, 9))
    replica.admit(first)
    assert num_shared_tokens(replica, second) == 4
    replica.admit(second)
    assert first.pages[:2] == second.pages[:2] and not set(first.pages[2:]) & set(second.pages[2:])
    assert replica.take_prefill_rows(10) == [(first, 0), (first, 2), (second, 4)]
    assert not replica.prefilling


def test_rows_are_taken_up_to_a_number_and_go_on_where_they_ended() -> None:
    replica, first, second = replica_of(), sequence_of(0, 7), sequence_of(1, (9, 9, 9))
    replica.admit(first)
    replica.admit(second)
    assert replica.take_prefill_rows(2) == [(first, 0), (first, 2)]
    assert replica.take_prefill_rows(9, sequences=1) == [(first, 4)]
    assert replica.take_prefill_rows(9, sequences=1) == [(second, 0)]


def test_the_same_prompt_again_waits_for_a_copy_of_the_partial_page() -> None:
    replica, first, second = replica_of(page_copies=1), sequence_of(0, 4), sequence_of(0, 4, generation=1)
    replica.admit(first)
    assert num_shared_tokens(replica, second) == 3, "the partial page too"
    replica.admit(second)
    assert replica.copying and replica.take_prefill_rows(10) == [(first, 0), (first, 2)]
    assert replica.take_page_copies() == [(first.pages[1], second.pages[1])]
    assert not replica.copying


def test_without_page_copies_each_prefills_its_own_partial_page() -> None:
    replica, first, second = replica_of(), sequence_of(0, 4), sequence_of(0, 4, generation=1)
    replica.admit(first)
    replica.admit(second)
    assert not replica.copying and replica.take_prefill_rows(10) == [(first, 0), (first, 2), (second, 2)]


def test_who_leaves_frees_its_slot_and_the_pages_that_nobody_shares() -> None:
    replica, first, second = replica_of(pages=10), sequence_of(0, 5), sequence_of(1, 5)
    replica.admit(first)
    replica.admit(second)
    replica.take_prefill_rows(10)
    replica.release(first)
    assert replica.slots[0] is None and first.pages == []
    assert replica.allocator.num_free == 9 - len(second.pages)
    replica.release_all()
    assert replica.allocator.num_free == 9 and not replica.busy
    assert num_shared_tokens(replica, sequence_of(2, 5)) == 0, "pages that are free have no prefix"


def test_who_shares_a_page_that_was_not_written_writes_it() -> None:
    replica, first, second = replica_of(), sequence_of(0, 5), sequence_of(1, 5)
    replica.admit(first)
    replica.admit(second)
    replica.take_prefill_rows(1)
    replica.release(first)
    assert replica.take_prefill_rows(10) == [(second, 2)], "the first page is written, the second is not"


def test_the_first_that_waits_for_a_copy_prefills_the_page_when_its_source_leaves() -> None:
    replica = replica_of(page_copies=1)
    first, second, third = (sequence_of(0, 4, generation=generation) for generation in range(3))
    for sequence in (first, second, third):
        replica.admit(sequence)
    replica.take_prefill_rows(10)
    replica.release(first)
    assert replica.take_prefill_rows(10) == [(second, 2)]
    assert replica.take_page_copies() == [(second.pages[1], third.pages[1])]


def replicas_with(capacity: Capacity, *requests: Request) -> list[Replica]:
    """One replica with the requests in its slots, in order."""
    replica = Replica(0, capacity)
    for asked in requests:
        replica.admit(Sequence(request=asked, generation_id=0))
    return [replica]


def test_a_partial_page_of_a_prompt_repeats_a_token_that_its_queries_see() -> None:
    capacity = capacity_of(page_size=4)
    batch = prefill_batch(capacity, replicas_with(capacity, request(0, (7, 8, 9, 7, 5, 6, 4), 2)))
    assert batch.tokens[0, :2].tolist() == [[7, 8, 9, 7], [5, 6, 5, 5]], "the prompt's last token is decode's"
    assert batch.start[0].tolist() == [0, 4, 0, 0] and batch.page[0].tolist() == [1, 2, 0, 0]
    assert batch.page_table[0, :2, :3].tolist() == [[1, 2, 0]] * 2


def test_a_row_of_prompt_logprobs_has_each_tokens_successor() -> None:
    capacity = capacity_of(page_size=4, prefill_rows=2, prompt_logprobs=1)
    replicas = replicas_with(capacity, request(0, (7, 8, 9, 6, 5, 4), 2, prompt_logprobs=True), request(1, 3, 2))
    sequence = replicas[0].slots[0]
    assert sequence is not None
    sequence.prompt_logprobs = record = PromptLogprobs(request=sequence.request)
    batch, rows = prompt_logprobs_batch(capacity, replicas)
    assert rows == [(0, 0, record), (0, 1, record)]
    assert batch.tokens[0].tolist() == [[7, 8, 9, 6], [5, 5, 5, 5]]
    assert batch.targets[0].tolist() == [[8, 9, 6, 5], [4, -1, -1, -1]]
    record.add(np.array([-1.0] * 4), None, None)
    assert prompt_logprobs_batch(capacity, replicas)[0].start[0, 0] == 4, "it goes on where it ended"


def slots_with(capacity: Capacity, *requests: Request) -> DecodeSlots:
    """One replica with the requests in its slots, in order."""
    replica, slots = Replica(0, capacity), DecodeSlots(capacity)
    for asked in requests:
        sequence = Sequence(request=asked, generation_id=0)
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
