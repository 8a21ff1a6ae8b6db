"""Runs, against a search of every period at every place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.health.loops import COPIES, Run, runs


def brute_force(tokens, least):
    """Every maximal repetition with its smallest period, by definition."""
    found = []
    for period in range(1, len(tokens) // COPIES + 1):
        begin = 0
        while begin < len(tokens):
            end = min(begin + period, len(tokens))
            while end < len(tokens) and tokens[end] == tokens[end - period]:
                end += 1
            maximal = begin == 0 or begin + period > len(tokens) or tokens[begin - 1] != tokens[begin - 1 + period]
            stretch = tokens[begin:end]
            smallest = next(p for p in range(1, len(stretch) + 1) if stretch[p:] == stretch[:-p] or p == len(stretch))
            if maximal and len(stretch) >= max(least, COPIES * period) and smallest == period:
                found.append(Run(begin=begin, end=end, period=period))
            begin += 1
    return found


def as_set(found):
    assert len(set(found)) == len(found)
    return set(found)


unit = st.lists(st.integers(0, 2), min_size=1, max_size=7)
stretches = st.lists(st.tuples(unit, st.integers(1, 12)).map(lambda pair: pair[0] * pair[1]), max_size=6)
sequences = st.lists(st.integers(0, 2), max_size=90) | stretches.map(lambda parts: sum(parts, []))


@given(tokens=sequences, least=st.integers(2, 30))
def test_runs_are_those_of_a_search_of_every_period_at_every_place(tokens, least):
    assert as_set(runs(tokens, least)) == set(brute_force(tokens, least))


@given(
    before=st.lists(st.integers(0, 9), max_size=40),
    unit=st.lists(st.integers(10, 10**6), min_size=1, max_size=150, unique=True),
    copies=st.integers(COPIES, 6),
    part=st.floats(0, 0.999),
    after=st.lists(st.integers(0, 9), max_size=40),
)
def test_a_run_of_any_period_is_found_at_its_place(before, unit, copies, part, after):
    stretch = unit * copies + unit[: int(part * len(unit))]
    run = Run(begin=len(before), end=len(before) + len(stretch), period=len(unit))
    assert (run in runs([*before, *stretch, *after], 2)) and run.length == len(stretch)


def test_two_copies_are_no_run():
    assert runs([*range(40), *range(40)], 2) == []
    assert runs([*range(40)] * 3, 2) == [Run(begin=0, end=120, period=40)]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 1, 2, 1]])
def test_sequences_shorter_than_three_copies_have_no_runs(tokens):
    assert runs(tokens, 2) == []


def test_a_long_answer_that_becomes_one_token():
    tokens = [*np.random.default_rng(0).integers(0, 32_000, 2_000).tolist(), *[7] * 30_000]
    (run,) = runs(tokens, 24)
    assert (run.begin, run.end, run.period) == (2_000, 32_000, 1)
