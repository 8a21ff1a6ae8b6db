"""The train step of a plan."""

import pytest

from lockstep.plan.train_step import largest_that_works


@pytest.mark.parametrize("limit", range(0, 18))
@pytest.mark.parametrize("guess", [1, 5, 16])
def test_the_search_finds_the_largest_in_few_questions(limit, guess):
    asked = []

    def works(value):
        assert value not in asked, "the compiler is slow: nothing is asked twice"
        asked.append(value)
        return value <= limit

    values = list(range(1, 17))
    assert largest_that_works(values, guess, works) == (min(limit, 16) or None)
    assert len(asked) <= 9


def test_a_good_guess_is_confirmed_with_two_questions():
    asked = []

    def works(value):
        asked.append(value)
        return value <= 4

    assert largest_that_works([1, 2, 4, 8, 16], 4, works) == 4
    assert asked == [4, 8]
