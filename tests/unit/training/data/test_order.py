"""The order of rows: a permutation per epoch, computed place by place."""

import numpy as np
import pytest

from lockstep.training.data import order
from lockstep.training.data.order import RowOrder


def make(*sizes, weights=None, seed=0, shuffle=True):
    return RowOrder(sizes=sizes, weights=weights or (1.0,) * len(sizes), seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("size", [10, order.SMALL + 1], ids=["list", "computed"])  # grain alone loses a row there
def test_every_row_comes_once_per_epoch_in_another_order(size):
    first, second = ([row for _, row in make(size).rows(range(e * size, (e + 1) * size))] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(size))
    assert first != second and first != list(range(size))
    assert first != [row for _, row in make(size, seed=1).rows(range(size))]
    assert second != [row for _, row in make(size, seed=1).rows(range(size))]  # epochs and seeds do not overlap
    assert make(size).rows([3, 1]) == [(0, first[3]), (0, first[1])]


@pytest.mark.parametrize("size", [order.SMALL, 2**16 + 1, 200_000, 2**18, 1_000_000, 10**9])
def test_rows_at_neighbouring_places_have_nothing_to_do_with_each_other(size):
    """For a uniform permutation each correlation is 1 / sqrt(count) of chance; six of them never come by chance."""
    count = min(size, 300_000)
    rows = np.array([row for _, row in make(size).rows(range(count))])
    for values in (rows / size, rows % 256 / 256):
        centred = (values - values.mean()) / values.std()
        found = [float(np.mean(centred[:-lag] * centred[lag:])) * count**0.5 for lag in range(1, 65)]
        assert max(map(abs, found)) < 6, found
        assert sum(each**2 for each in found) < 64 + 6 * (2 * 64) ** 0.5, found


def test_without_shuffle_the_order_is_that_of_the_files():
    assert make(3, shuffle=False).rows(range(7)) == [(0, n % 3) for n in range(7)]


def test_a_place_among_billions_needs_no_list():
    rows = [row for _, row in make(10**9, seed=7).rows(range(2000))]
    assert len(set(rows)) == 2000 and max(rows) < 10**9
    assert 0.45e9 < np.mean(rows) < 0.55e9


def test_sources_take_turns_by_weight_and_have_epochs_of_their_own():
    drawn = make(5, 100, weights=(3.0, 1.0)).rows(range(400))
    for start in range(0, 400, 40):
        assert sum(source == 0 for source, _ in drawn[start : start + 40]) == 30
    small = [row for source, row in drawn if source == 0]
    for start in range(0, 300, 5):
        assert sorted(small[start : start + 5]) == list(range(5))
    assert sorted(row for source, row in drawn if source == 1) == list(range(100))
    assert make(5, 100, weights=(3.0, 1.0)).rows(range(200, 300)) == drawn[200:300]
