"""The kernel that writes K/V into the pool, in an interpreter, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models.attention.page_ops import to_pool
from lockstep.models.attention.tpu_kernels import write_entries
from tests.interpret import kernel_on_cpu

ENTRIES = 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("size", [(4, 128), (8, 2, 128)])
def test_each_row_is_where_its_index_says_and_nothing_else_changes(dtype: str, size: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    pool, rows = (jnp.asarray(rng.standard_normal((count, *size)), jnp.float32) for count in (ENTRIES, 5))
    pool = to_pool(pool, jnp.dtype(dtype))
    index = np.array([7, 0, 11, 3, 1], np.int32)
    want = np.array(pool)
    want[index] = to_pool(rows, pool.dtype)
    with kernel_on_cpu():
        got = jax.jit(write_entries)(pool, jnp.asarray(index), rows)
    assert got.dtype == pool.dtype
    np.testing.assert_array_equal(np.asarray(got), want)


def test_of_rows_with_the_same_index_one_wins_and_its_neighbours_stay() -> None:
    pool, rows = jnp.zeros((ENTRIES, 2, 128)), jnp.broadcast_to(jnp.arange(1.0, 4.0)[:, None, None], (3, 2, 128))
    with kernel_on_cpu():
        got = np.asarray(write_entries(pool, jnp.array([0, 5, 0]), rows))
    assert (got[5] == 2).all() and set(np.unique(got[0])) <= {1.0, 3.0}
    assert not got[[1, 2, 3, 4, 6, 7, 8, 9, 10, 11]].any()


def test_rows_get_the_dtype_of_the_pool() -> None:
    with kernel_on_cpu():
        got = write_entries(jnp.zeros((2, 2, 128), jnp.bfloat16), jnp.array([1]), jnp.full((1, 2, 128), 1.001))
    assert got.dtype == jnp.bfloat16 and (np.asarray(got[1], np.float32) == 1.0).all()
