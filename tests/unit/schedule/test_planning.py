"""How long a launch is, and what a batch has."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.schedule import Capacity
from lockstep.schedule.planning import decode_batch, num_decode_steps, prefill_batch, prompt_logprobs_batch
from lockstep.schedule.prompt_logprobs import PromptLogprobs
from lockstep.schedule.replica import Replica
from lockstep.schedule.sequence import Sequence
from lockstep.types import Request
from tests.unit.schedule.test_scheduler import capacity_of, request


@given(st.lists(st.integers(1, 300), min_size=1, max_size=70), st.integers(1, 128), st.booleans(), st.booleans())
def test_a_launch_is_never_empty_nor_longer_than_anyone_needs(
    remaining: list[int], limit: int, waiting: bool, may_stop: bool
) -> None:
    steps = num_decode_steps(remaining, limit, waiting=waiting, may_stop=may_stop)
    assert 1 <= steps <= min(limit, max(remaining))
    assert steps == num_decode_steps(remaining[::-1], limit, waiting=waiting, may_stop=may_stop)
    if not waiting:
        assert steps == min(limit, max(remaining))
    elif not may_stop:

        def rate(length: int) -> float:
            return sum(min(left, length) for left in remaining) / (length + 4)

        best = max(rate(length) for length in range(1, min(limit, max(remaining)) + 1))
        assert np.isclose(rate(steps), best)


def test_one_short_sequence_does_not_end_the_launch_of_many_long_ones() -> None:
    assert num_decode_steps([1, *[64] * 63], 64, waiting=True, may_stop=False) == 64
    assert num_decode_steps([*[4] * 63, 64], 64, waiting=True, may_stop=False) == 4
    assert num_decode_steps([64] * 64, 64, waiting=True, may_stop=True) == 16


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


def test_a_decode_batch_reads_the_last_token_at_its_position() -> None:
    capacity = capacity_of(page_size=4, stop_ids=2)
    first = request(5, (7, 8), 3, stop_token_ids=(1,), seed=9, temperature=0.5)
    batch = decode_batch(capacity, replicas_with(capacity, first, request(6, 1, 6)), waiting=False)
    assert batch.num_steps == 4, "the capacity's, for the longest has 6 left"
    assert batch.token[0, :2].tolist() == [8, 0] and batch.position[0, :2].tolist() == [1, 0]
    assert batch.remaining[0].tolist() == [3, 6, 0, 0] and batch.stop_ids[0, 0].tolist() == [1, -1]
    assert batch.draw[0, 0].tolist() == [9, 5, 0] and batch.temperature[0, 0] == 0.5


def test_stop_tokens_that_are_ignored_end_nothing() -> None:
    capacity = capacity_of(stop_ids=2)
    one = request(0, 1, 2, stop_token_ids=(1, 2), ignore_eos=True)
    assert decode_batch(capacity, replicas_with(capacity, one), waiting=False).stop_ids[0, 0].tolist() == [-1, -1]


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
