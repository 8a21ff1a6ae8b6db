"""Tests of shares: the probability that a difference is chance, and how many tests to correct for."""

import functools
import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from jaxtyping import Float

_ERROR: Final = 1e-9  # what sums of shares may be off a whole number

type Sample = Float[np.ndarray, "... 2"]
"""Successes and trials of some samples; they need not be whole."""


def fisher_tail(sample: Sample, second: Sample, odds: float = 1.0) -> float:
    """The probability of so many successes or more in the first of two samples, given those of both together.

    It is the upper tail of Fisher's noncentral hypergeometric distribution (Fisher 1935; McCullagh and Nelder 1989,
    section 7.3.2). Numbers that are not whole are rounded so that the probability becomes larger.

    Args:
        odds: The ratio of the odds of the two samples under the hypothesis.
    """
    x, n, y, m = (int(value) for value in _whole(sample, second))
    low, high = max(0, x + y - m), min(n, x + y)
    values = np.arange(low, high + 1)
    logs = _log_choose(n, values) + _log_choose(m, x + y - values) + values * math.log(odds)
    weights = np.exp(logs - logs.max())
    return float(weights[x - low :].sum() / weights.sum())


def least_tail(sample: Sample, second: Sample) -> Float[np.ndarray, " test"]:
    """The smallest `fisher_tail` of each of some pairs of samples with the same trials, and successes in both together.

    It is that of odds 1, a bound below that of others; 1 where a sample has no trials.
    """
    x, n, y, m = _whole(sample, second)
    most = np.minimum(n, x + y)
    logs = _log_choose(n, most) + _log_choose(m, x + y - most) - _log_choose(n + m, x + y)
    return np.where((n > 0) & (m > 0), np.exp(logs), 1.0)


def deviations(sample: Sample, second: Sample) -> Float[np.ndarray, " test"]:
    """The standard deviations by which the successes of each sample are more than those of another; 0 without any."""
    (x, n), (y, m) = np.moveaxis(sample, -1, 0), np.moveaxis(second, -1, 0)
    total = np.maximum(n + m, 1)
    rate = (x + y) / total
    spread = np.sqrt(n * m / total * rate * (1 - rate))
    return np.divide(x - n * rate, spread, out=np.zeros_like(spread), where=spread > 0)


def design_effect(differing: float, successes: float, pairs: float, total: float) -> float:
    """The number of members of a cluster that tell as much as one that is drawn by itself (Kish 1965, section 5.4).

    It is ``1 + (size - 1) * rho``, where rho, the correlation within clusters, is 1 minus the pairs within clusters
    that differ over those that would if all members were drawn by themselves; at least 0.

    Args:
        differing: The ordered pairs of a success and a failure in the same cluster, over all clusters.
        successes: The successes of all clusters.
        pairs: The ordered pairs in the same cluster.
        total: The members of all clusters.
    """
    expected = pairs * successes * (total - successes) / (total * (total - 1)) if total > 1 else 0.0
    return 1 + pairs / total * max(0.0, 1 - differing / expected) if expected else 1.0


def binomial_tail(successes: float, trials: int, share: float) -> float:
    """The probability of so many successes or more of independent trials; a part of one does not count."""
    values = np.arange(math.floor(successes + _ERROR), trials + 1)
    logs = _log_choose(trials, values) + values * math.log(share) + (trials - values) * math.log1p(-share)
    return float(np.exp(logs).sum())


def tarone_factor(rate: float, least: Iterable[float]) -> int:
    """The number of tests to correct for: those that could be significant at all (Tarone 1990, Biometrics 46:515).

    Args:
        rate: The rate of false alarms of all tests together.
        least: The smallest probability that each test can have, given its trials, and its successes in both samples
            together.
    """
    rising = np.sort(np.fromiter(least, float))
    for count in range(1, len(rising) + 1):
        if np.searchsorted(rising, rate / count, side="right") <= count:
            return count
    return max(1, len(rising))


def _whole(sample: Sample, second: Sample) -> Any:
    """Successes and trials of the two, as whole numbers that make their difference smaller."""
    (x, n), (y, m) = np.moveaxis(np.asarray(sample), -1, 0), np.moveaxis(np.asarray(second), -1, 0)
    n, m = np.ceil(n - _ERROR).astype(int), np.floor(m + _ERROR).astype(int)
    x, y = np.floor(x + _ERROR).astype(int), np.ceil(y - _ERROR).astype(int)
    return np.minimum(x, n), n, np.minimum(y, m), m


def _log_choose(total: Any, chosen: Any) -> Any:
    """The logarithms of binomial coefficients."""
    logs = _log_factorials(1 << max(10, int(np.max(total, initial=0)).bit_length()))
    return logs[total] - logs[chosen] - logs[total - chosen]


@functools.lru_cache(maxsize=4)
def _log_factorials(size: int) -> Float[np.ndarray, " number"]:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])
