"""Rows of a data set, and the order in which they are drawn."""

import numpy as np

from lockstep.training import TokenizedRows


def numbers(n, seed=0, shuffle=True):
    return TokenizedRows(columns={"n": np.arange(n)}, seed=seed, shuffle=shuffle)


def test_every_row_comes_once_per_epoch_over_batch_borders():
    rows = numbers(10)
    drawn = np.concatenate([rows.indices(step, 4) for step in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()


def test_order_depends_on_the_seed_alone_and_hosts_take_their_part():
    whole = numbers(100, seed=3).indices(7, 12)
    parts = [numbers(100, seed=3).batch(7, 12, slice(i, i + 4))["n"] for i in (0, 4, 8)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert whole.tolist() != numbers(100, seed=4).indices(7, 12).tolist()
    assert numbers(10, shuffle=False).indices(1, 4).tolist() == [4, 5, 6, 7]


def test_a_batch_larger_than_the_data():
    assert np.bincount(numbers(3).indices(0, 7)).tolist() in ([2, 2, 3], [2, 3, 2], [3, 2, 2])


def test_digest_sees_values_and_order():
    assert numbers(5).digest() == numbers(5).digest()
    assert len({numbers(5).digest(), numbers(6).digest(), numbers(5, seed=1).digest()}) == 3
