"""Attention in plain JAX: page by page as all at once, into the pool and into the gathered context."""

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models.attention import Heads, XlaAttention

HEADS = Heads(kv_heads=1, group=2, head_size=4)
_rng = np.random.default_rng(0)
POOL = _rng.standard_normal((6, 2, 2, 4)).astype(np.float32)


def indices(*values: int) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("page_by_page", [False, True])
def test_pages_are_written_and_copied(page_by_page: bool) -> None:
    attention = XlaAttention(heads=HEADS, page_by_page=page_by_page)
    kv = _rng.standard_normal((2, 2, 2, 4)).astype(np.float32)
    pool = attention.write_pages(jnp.asarray(POOL), indices(1, 3), jnp.asarray(kv))
    expected = POOL.copy()
    expected[[1, 3]] = kv
    np.testing.assert_array_equal(pool, expected)
    expected[[2, 5]] = expected[[1, 0]]
    np.testing.assert_array_equal(attention.copy_pages(pool, indices(1, 0), indices(2, 5)), expected)


def test_what_a_step_writes_is_attended_to_and_stays_in_the_pool() -> None:
    attention = XlaAttention(heads=HEADS)
    cache = attention.begin_decode(jnp.asarray(POOL), jnp.asarray([[2, 4]], jnp.int32), indices(2), 1)
    kv = np.ones((1, 2, 4), np.float32)
    cache = attention.write(cache, jnp.int32(0), indices(4)[:, None], indices(2)[:, None], jnp.asarray(kv)[:, None])
    expected = POOL.copy()
    expected[4, 0] = 1.0
    np.testing.assert_array_equal(attention.end_decode(cache), expected)
    q = np.full((1, 1, 2, 4), 50.0, np.float32)  # so large that what is attended to shows
    last = attention.decode(
        jnp.asarray(q)[:, None], cache, jnp.int32(0), jnp.asarray([[2, 4]], jnp.int32), indices(2), jnp.asarray([True])
    )
    keys = np.concatenate([POOL[2, :, 0], np.ones((1, 4), np.float32)])
    values = np.concatenate([POOL[2, :, 1], np.ones((1, 4), np.float32)])
    scores = keys @ q[0, 0, 0] / 2
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(np.asarray(last)[0, 0, 0, 0], weights / weights.sum() @ values, rtol=1e-5)
