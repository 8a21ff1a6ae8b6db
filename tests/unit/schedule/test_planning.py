"""How long a launch is, and what a batch has."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.schedule.planning import num_decode_steps


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
