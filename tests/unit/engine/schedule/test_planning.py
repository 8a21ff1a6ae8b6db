"""How long a launch is, and what a batch has."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule import Capacity
from lockstep.engine.schedule.planning import Admission, num_decode_steps, prefill_batch, prompt_logprobs_batch
from lockstep.engine.schedule.replica import Replica
from lockstep.engine.schedule.sequence import PromptLogprobs, Sequence
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


@settings(max_examples=300, deadline=None)
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
