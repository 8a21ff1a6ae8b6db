"""Rows of examples: nothing lost, nothing twice, and little padding."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.data import packing
from lockstep.training.data.examples import TokenSequence
from lockstep.training.data.packing import RowShape


def rows_of(examples, **values):
    shape = RowShape(**({"truncate": False, "packing": True, "documents": False, "pairs": False} | values))
    packer = shape.packer()
    return [row for example in examples for row in packer.add(shape.fit(example))] + list(packer.finish())


def examples_of(sizes):
    """Examples with tokens of their own."""
    ends = np.cumsum(sizes)
    return [(TokenSequence(1, list(range(end - size, end))),) for size, end in zip(sizes, ends, strict=True)]


@given(st.lists(st.integers(2, 12), max_size=300), st.booleans())
def test_examples_stay_whole_and_come_once(sizes, packing_):
    rows = rows_of(examples_of(sizes), length=12, packing=packing_)
    assert all(sum(len(one.tokens) for one in row) <= 12 for row in rows)
    found = sorted(tuple(one.tokens) for row in rows for one in row)
    assert found == sorted(tuple(one.tokens) for (one,) in examples_of(sizes))


@given(st.lists(st.integers(2, 40), max_size=50))
def test_documents_fill_rows_in_order(sizes):
    rows = rows_of(examples_of(sizes), length=7, documents=True)
    assert all(sum(len(one.tokens) for one in row) == 7 for row in rows[:-1])
    stream = [int(token) for row in rows for one in row for token in one.tokens]
    # What is left at the end is dropped only where it has no target.
    assert stream == list(range(sum(sizes)))[: len(stream)] and sum(sizes) - len(stream) <= 3
    if sum(sizes) % 7 == 1:
        assert len(stream) == sum(sizes) - 1


def test_first_fit_wastes_little():
    sizes = np.random.default_rng(0).integers(20, 400, 2000)
    rows = rows_of(examples_of(sizes), length=512)
    assert 1 - sizes.sum() / (512 * len(rows)) < 0.05
    assert 1 - sizes.sum() / (512 * len(sizes)) > 0.5


def test_the_fullest_open_row_makes_room(monkeypatch):
    monkeypatch.setattr(packing, "OPEN_ROWS", 2)
    rows = rows_of(examples_of([6, 8, 7]), length=10)
    assert [[len(one.tokens) for one in row] for row in rows] == [[8], [6], [7]]


def test_a_row_is_in_the_bucket_that_is_just_long_enough_for_its_longest_sequence():
    shape = RowShape(length=16, truncate=False, packing=False, documents=False, pairs=True, shorter=(4, 8))
    assert shape.lengths == (4, 8, 16)
    for sizes, bucket in (((2, 4), 0), ((5, 2), 1), ((8, 8), 1), ((1, 9), 2), ((16, 3), 2)):
        assert shape.bucket([TokenSequence(1, [0] * size) for size in sizes]) == bucket, sizes
