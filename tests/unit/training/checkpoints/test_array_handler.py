"""Chunks of what is written; test_checkpoint_arrays.py reads it."""

import pytest

from lockstep.training.checkpoints.array_handler import chunk_shape


@pytest.mark.parametrize(
    ("shard", "max_bytes", "single_axes", "chunk"),
    [
        ((), 1, (), ()),
        ((6, 4), 1000, (), (6, 4)),
        ((6, 4), 48, (), (3, 4)),
        ((6, 4), 40, (), (2, 4)),
        ((7, 4), 40, (), (1, 4)),
        ((7, 4), 8, (), (1, 2)),
        ((5, 6, 4), 1000, (0,), (1, 6, 4)),
    ],
)
def test_chunks_divide_a_shard_and_are_no_larger_than_asked(shard, max_bytes, single_axes, chunk):
    assert chunk_shape(shard, 4, max_bytes, single_axes) == chunk
