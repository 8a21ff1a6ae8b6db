"""The length of a launch, the contents of a batch, and requests that can never fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule import Capacity, Scheduler, check_capacity
from lockstep.engine.schedule.planning import Admission, num_decode_steps, prefill_batch, prompt_logprobs_batch
from lockstep.engine.schedule.replica import Replica
from lockstep.engine.schedule.sequence import PromptLogprobs, Sequence
from lockstep.errors import CapacityError
from lockstep.types import Request
from tests.unit.engine.schedule.placements import choose
from tests.unit.engine.schedule.test_replica import PAGE, sequence_of
from tests.unit.engine.schedule.test_scheduler import capacity_of, request


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


def replicas_with(capacity: Capacity, *requests: Request) -> list[Replica]:
    """One replica with the requests in its slots, in order."""
    replica = Replica(0, capacity)
    for one in requests:
        replica.admit(Sequence(request=one, generation_id=0))
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


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)


@settings(max_examples=300)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(6, 16),
    st.booleans(),
    st.lists(st.tuples(PROMPTS, st.integers(1, 4), st.booleans(), st.integers(0, 20)), max_size=30),
)
def test_it_is_the_choice_of_one_after_the_other(replicas, slots, pages, copies, steps):
    capacity = capacity_of(page_size=PAGE, slots=slots, pages=pages, replicas=replicas, page_copies=int(copies))
    made = [Replica(index, capacity) for index in range(replicas)]
    admission, active = Admission(capacity, made), []
    for number, (prompt, new, crowded, leaves) in enumerate(steps):
        sequence = sequence_of(number, prompt, new)
        found = admission.choose(sequence, crowded=crowded)
        assert found is choose(made, sequence, crowded)
        if found is not None:
            found.admit(sequence)
            active.append(sequence)
        elif active:
            sequence = active.pop(leaves % len(active))
            found = made[sequence.replica]
            found.release(sequence)
        if found is not None:
            admission.update(found)
    for sequence in active:
        made[sequence.replica].release(sequence)
    assert not made[0].holders, "what nobody has is listed nowhere"


def test_replicas_that_are_idle_are_given_nothing() -> None:
    capacity = capacity_of(page_size=PAGE, slots=2, replicas=4, idle_replicas=2)
    made = [Replica(index, capacity) for index in capacity.active_replicas]
    admission, found = Admission(capacity, made), []
    for number in range(5):
        sequence = sequence_of(number, (number, number))
        replica = admission.choose(sequence, crowded=False)
        found.append(None if replica is None else replica.index)
        if replica is not None:
            replica.admit(sequence)
            admission.update(replica)
    assert found == [0, 2, 0, 2, None]


@pytest.mark.parametrize(
    ("one", "capacity", "message"),
    [
        (
            request(7, 10, 8),
            capacity_of(),
            r"prompt 7 has 10 tokens and max_new_tokens is 8, 18 together; max_seq_len is 16\. Shorten the prompt to "
            r"at most 8 tokens, or lower max_new_tokens to at most 6, or raise max_seq_len to at least 18\.",
        ),
        (request(7, 16, 3), capacity_of(), r"16\. Shorten the prompt to at most 13 tokens, or raise max_seq_len"),
        (request(7, 3, 16), capacity_of(), r"16\. Lower max_new_tokens to at most 13, or raise max_seq_len"),
        (request(7, 16, 16), capacity_of(), r"max_seq_len is 16\. Raise max_seq_len to at least 32\.$"),
        (
            request(7, 6, 5),
            capacity_of(pages=5),
            r"prompt 7 needs 5 pages of 2 tokens for its 6 prompt and 5 new tokens; a replica has 4 .* Raise max_pages "
            r"to at least 6, or lower max_new_tokens to at most 3\.",
        ),
        (request(7, 12, 1), capacity_of(pages=5), r"Raise max_pages to at least 7, or shorten the prompt\."),
        (request(7, 1, 1, stop_token_ids=(1, 2, 3)), capacity_of(), "3 stop token ids; the programs were built for 2"),
    ],
)
def test_what_can_never_fit_is_refused(one: Request, capacity: Capacity, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        Scheduler(capacity, [request(0, 1, 1), one])


@pytest.mark.parametrize("prompt", [1, 2, 5, 12])
def test_the_values_that_a_refusal_names_work(prompt: int) -> None:
    for pages in range(2, 9):
        capacity = capacity_of(pages=pages)
        room = (pages - 1) * capacity.page_size + 1 - prompt
        if 1 <= room <= 16 - prompt:
            check_capacity(capacity, [request(0, prompt, room)])
        if room + 1 <= 16 - prompt:
            with pytest.raises(CapacityError, match=rf"^prompt 0 needs .* a replica has {pages - 1} "):
                check_capacity(capacity, [request(0, prompt, max(room + 1, 1))])
