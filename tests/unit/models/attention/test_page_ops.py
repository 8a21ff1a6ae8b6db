"""Whole pages, read, written and copied one at a time as all at once."""

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models.attention import page_ops

POOL = np.random.default_rng(0).standard_normal((6, 2, 4, 3)).astype(np.float32)


def indices(*values: int) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("read_kv", [page_ops.gather_kv, page_ops.read_kv_page_by_page])
def test_the_pages_of_a_sequence_are_read_in_order_k_and_v_by_head(read_kv: page_ops.ReadKv) -> None:
    page = np.array([[5, 0, 5], [2, 1, 3]])
    k, v = read_kv(jnp.asarray(POOL), indices(*page.flat).reshape(page.shape))
    positions = POOL[page].reshape(2, 3 * 2, 4, 3)  # [sequence, position, head, size]
    np.testing.assert_array_equal(k, positions[:, :, 0::2].swapaxes(1, 2))
    np.testing.assert_array_equal(v, positions[:, :, 1::2].swapaxes(1, 2))


def test_of_rows_that_name_a_page_the_last_one_wins_and_other_pages_stay() -> None:
    kv = np.arange(3 * 2 * 4 * 3, dtype=np.float32).reshape(3, 2, 4, 3)
    got = page_ops.write_pages_one_by_one(jnp.asarray(POOL), indices(1, 4, 1), jnp.asarray(kv))
    expected = POOL.copy()
    expected[4], expected[1] = kv[1], kv[2]
    np.testing.assert_array_equal(got, expected)


def test_what_is_written_has_the_dtype_of_the_pool() -> None:
    pool = jnp.zeros((2, 2, 4, 3), jnp.bfloat16)
    got = page_ops.write_pages_one_by_one(pool, indices(1), jnp.full((1, 2, 4, 3), 1.001, jnp.float32))
    assert got.dtype == jnp.bfloat16 and (np.asarray(got[1], np.float32) == 1.0).all()


def test_pages_are_copied_to_their_targets() -> None:
    got = page_ops.copy_pages_one_by_one(jnp.asarray(POOL), indices(5, 0), indices(2, 3))
    expected = POOL.copy()
    expected[[2, 3]] = POOL[[5, 0]]
    np.testing.assert_array_equal(got, expected)
