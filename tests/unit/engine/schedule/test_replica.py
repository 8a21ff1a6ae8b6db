"""The slots, pages and prefill queue of one replica."""

from lockstep.engine.schedule.pages import page_keys, tail_key
from lockstep.engine.schedule.replica import Replica
from lockstep.engine.schedule.sequence import Sequence
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
