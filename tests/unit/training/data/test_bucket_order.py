"""Batches of one length each: every row once per epoch, a pure function of the step."""

import numpy as np
import pytest

from lockstep.training.data.bucket_order import BucketOrder
from lockstep.training.data.order import RowOrder


def make(*sizes, weights=None, seed=0, shuffle=True):
    return BucketOrder(sizes=sizes, weights=weights or (1.0,) * len(sizes), seed=seed, shuffle=shuffle)


def bucket_of(sizes, row):
    return int(np.searchsorted(np.cumsum(sizes), row, side="right"))


def batches(order, steps, batch_size):
    return [order.rows(step, batch_size, slice(0, batch_size)) for step in steps]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_batch_has_rows_of_one_bucket_and_every_row_comes_once_per_epoch(shuffle):
    sizes = (8, 0, 24, 16)
    found = batches(make(sizes, shuffle=shuffle), range(12), 4)
    buckets = [{bucket_of(sizes, row) for _, row in batch} for batch in found]
    assert all(len(each) == 1 for each in buckets)
    turns = [each.pop() for each in buckets]
    assert [turns.count(bucket) for bucket in range(4)] == [2, 0, 6, 4]
    assert turns != sorted(turns)
    rows = [row for batch in found for _, row in batch]
    assert sorted(rows) == list(range(48))
    again = [row for batch in batches(make(sizes, shuffle=shuffle), range(12, 24), 4) for _, row in batch]
    assert sorted(again) == list(range(48)) and (again != rows) == shuffle
    assert make(sizes).buckets == (0, 2, 3)


def test_buckets_of_one_size_have_orders_of_their_own():
    first, second = (order.rows(range(100)) for _, order in make((100, 100))._in_bucket)
    assert sorted(first) == sorted(second) and sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_a_batch_is_a_function_of_the_step_and_hosts_take_their_part():
    sizes = (5, 11, 100)
    whole = batches(make(sizes), range(40), 8)
    assert batches(make(sizes), [31], 8) == [whole[31]]
    parts = [make(sizes).rows(31, 8, slice(start, start + 2)) for start in (0, 2, 4, 6)]
    assert [row for part in parts for row in part] == whole[31]
    assert batches(make(sizes, seed=1), range(40), 8) != whole


def test_sources_keep_their_weights_whatever_their_lengths():
    """The first source has short rows mostly, the second long ones; the first is to have three rows in four."""
    sizes = (90, 10), (20, 180)
    order = make(*sizes, weights=(3.0, 1.0))
    rows = [one for batch in batches(order, range(200), 8) for one in batch]
    drawn = [(source, bucket_of(sizes[source], row)) for source, row in rows]
    assert sum(source == 0 for source, _ in drawn) / len(drawn) == pytest.approx(0.75, abs=0.01)
    assert drawn.count((0, 0)) / len(drawn) == pytest.approx(0.75 * 0.9, abs=0.01)
    assert drawn.count((1, 1)) / len(drawn) == pytest.approx(0.25 * 0.9, abs=0.01)


def test_with_one_length_the_order_is_that_of_the_rows():
    rows = RowOrder(sizes=(5, 9), weights=(2.0, 1.0), seed=3, shuffle=True)
    order = make((5,), (9,), weights=(2.0, 1.0), seed=3)
    assert batches(order, [0, 7], 6) == [rows.rows(range(0, 6)), rows.rows(range(42, 48))]
    assert order.first(4) == [rows.rows(range(4))]


def test_the_beginning_of_the_order_tells_seeds_and_shares_apart():
    orders = [make((6, 6)), make((6, 6), seed=1), make((6, 6), shuffle=False), make((6, 3))]
    firsts = [repr(order.first(16)) for order in orders]
    assert len(set(firsts)) == 4 and firsts[0] == repr(make((6, 6)).first(16))
