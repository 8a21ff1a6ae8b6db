"""Tests of shares against enumeration, SciPy, and draws."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lockstep.health.significance import (
    binomial_tail,
    design_effect,
    deviations,
    fisher_tail,
    least_tail,
    tarone_factor,
)


@pytest.mark.parametrize("odds", [1.0, 2.0, 5.0])
def test_fishers_tail_is_scipys(odds):
    for x, n, y, m in itertools.product(range(5), (4, 7), range(0, 20, 4), (20, 31)):
        expected = stats.nchypergeom_fisher(n + m, n, x + y, odds).sf(x - 1)
        assert fisher_tail(np.array([x, n]), np.array([y, m]), odds) == pytest.approx(expected, rel=1e-9)
        least = stats.nchypergeom_fisher(n + m, n, x + y, 1).pmf(min(n, x + y))
        assert least_tail(np.array([[x, n]]), np.array([[y, m]])) == pytest.approx(least)


def test_numbers_that_are_not_whole_make_the_probability_larger():
    whole = fisher_tail(np.array([6, 9]), np.array([3, 40]))
    assert fisher_tail(np.array([6.9, 8.2]), np.array([2.1, 40.9])) == whole
    assert fisher_tail(np.array([6 - 1e-12, 9 + 1e-12]), np.array([3, 40])) == whole


def test_a_sample_without_trials_can_say_nothing():
    samples = np.array([[0.0, 0.0], [3.0, 5.0]])
    assert least_tail(samples, samples[::-1]).tolist() == [1.0, 1.0]
    assert not np.isnan(deviations(samples, samples[::-1])).any()


def test_the_binomial_tail_is_scipys():
    for successes, trials in itertools.product(range(9), (8, 30)):
        assert binomial_tail(successes + 0.5, trials, 1 / 3) == pytest.approx(
            stats.binom(trials, 1 / 3).sf(successes - 1)
        )


@pytest.mark.parametrize(("same", "expected"), [(0.0, 1.0), (0.5, 1 + 7 * 0.5), (1.0, 8.0)])
def test_the_design_effect_is_that_of_the_correlation_that_members_were_drawn_with(same, expected):
    random = np.random.default_rng(0)
    common = random.random((4000, 1)) < 0.2
    # With the probability sqrt(same) a member is that of the whole cluster: two of them are with the probability same.
    members = np.where(random.random((4000, 8)) < math.sqrt(same), common, random.random((4000, 8)) < 0.2)
    counts = members.sum(1)
    differing = (counts * (8 - counts)).sum()
    assert design_effect(differing, counts.sum(), 4000 * 8 * 7, 4000 * 8) == pytest.approx(expected, abs=0.25)


def test_one_member_in_each_cluster_is_drawn_by_itself():
    assert design_effect(0, 2, 0, 3) == design_effect(0, 0, 56, 8) == design_effect(0, 0, 0, 0) == 1


def test_only_tests_that_could_be_significant_are_corrected_for():
    assert tarone_factor(1e-3, [1e-9, 0.5, 0.1, 1.0]) == 1
    assert tarone_factor(1e-3, [1e-9, 1e-9, 4e-4, 0.1]) == 3
    assert tarone_factor(1e-3, [1e-9] * 7) == 7
    assert tarone_factor(1e-3, []) == 1
