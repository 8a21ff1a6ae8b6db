import functools

import jax
import numpy as np
import pytest

from lockstep.models.attention import ScoreModifier, paged_attention

KV_HEADS, GROUP, HEAD = 2, 3, 4
HUGE = float(np.finfo(np.float32).max)
attend = jax.jit(paged_attention)


@functools.cache
def case(page_size: int, queries: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Three sequences of different lengths over shuffled pages: q, k and v by position, pool, table, start."""
    rng = np.random.default_rng(seed)
    start = np.array([0, 5, 17 - queries], np.int32)
    width = -(-24 // page_size)
    q = rng.standard_normal((3, queries, KV_HEADS, GROUP, HEAD), np.float32)
    k, v = rng.standard_normal((2, 3, width * page_size, KV_HEADS, HEAD), np.float32)
    table = rng.permutation(np.arange(1, 3 * width + 1)).reshape(3, width).astype(np.int32)
    pool = np.zeros((3 * width + 2, page_size, 2 * KV_HEADS, HEAD), np.float32)
    pool[table.reshape(-1), :, 0::2] = k.reshape(-1, page_size, KV_HEADS, HEAD)
    pool[table.reshape(-1), :, 1::2] = v.reshape(-1, page_size, KV_HEADS, HEAD)
    return q, k, v, pool, table, start


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Attention one query at a time, in float64."""
    out = np.zeros(q.shape)
    for s, i, h, g in np.ndindex(q.shape[:-1]):
        seen = slice(0, start[s] + i + 1)
        scores = k[s, seen, h].astype(np.float64) @ q[s, i, h, g] / np.sqrt(HEAD)
        weights = np.exp(scores - scores.max())
        out[s, i, h, g] = weights / weights.sum() @ v[s, seen, h]
    return out


@pytest.mark.parametrize(("page_size", "queries"), [(8, 1), (8, 8), (4, 1), (1, 3)])
def test_equals_plain_attention(page_size: int, queries: int) -> None:
    q, k, v, pool, table, start = case(page_size, queries)
    np.testing.assert_allclose(attend(q, pool, table, start), plain(q, k, v, start), rtol=0, atol=1e-5)


def test_where_the_pages_lie_does_not_matter() -> None:
    q, _, _, pool, table, start = case(8, 8)
    order = np.random.default_rng(7).permutation(len(pool)).astype(np.int32)
    moved = np.zeros_like(pool)
    moved[order] = pool
    np.testing.assert_array_equal(attend(q, moved, order[table], start), attend(q, pool, table, start))


@pytest.mark.parametrize("garbage", [HUGE, -HUGE, np.inf, np.nan])
@pytest.mark.parametrize("queries", [1, 8])
def test_what_lies_beyond_a_query_has_no_influence(queries: int, garbage: float) -> None:
    q, k, v, pool, table, start = case(8, queries)
    expected = np.asarray(attend(q, pool, table, start))
    dirty, seen = pool.copy(), start + queries
    dirty[0] = garbage  # a page of nobody
    for s in range(3):
        for position in range(seen[s], table.shape[1] * 8):
            dirty[table[s, position // 8], position % 8] = garbage
    np.testing.assert_array_equal(attend(q, dirty, table, start), expected)
    unused = np.where(np.arange(table.shape[1]) * 8 < seen[:, None], table, 0)
    np.testing.assert_array_equal(attend(q, dirty, unused, start), expected)


def test_a_later_query_of_the_same_row_is_not_seen() -> None:
    q, k, v, pool, table, start = case(8, 8)
    expected = np.asarray(attend(q, pool, table, start))
    dirty = pool.copy()
    for s in range(3):
        last = start[s] + 7
        dirty[table[s, last // 8], last % 8] = HUGE
    np.testing.assert_array_equal(attend(q, dirty, table, start)[:, :7], expected[:, :7])


def test_half_precision_in_half_precision_out() -> None:
    q, k, v, pool, table, start = case(8, 1)
    out = attend(q.astype(jax.numpy.bfloat16), pool.astype(jax.numpy.bfloat16), table, start)
    assert out.dtype == jax.numpy.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), plain(q, k, v, start), rtol=0, atol=0.05)


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize(("cap", "window"), [(None, 3), (2.0, None), (0.5, 6)])
def test_soft_cap_and_window(queries: int, cap: float | None, window: int | None) -> None:
    q, k, v, pool, table, start = case(8, queries)
    out = np.zeros(q.shape)
    for s, i, h, g in np.ndindex(q.shape[:-1]):
        seen = slice(0 if window is None else max(0, start[s] + i + 1 - window), start[s] + i + 1)
        scores = k[s, seen, h].astype(np.float64) @ q[s, i, h, g] / np.sqrt(HEAD)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out[s, i, h, g] = weights / weights.sum() @ v[s, seen, h]
    ruled = jax.jit(functools.partial(paged_attention, modifier=ScoreModifier(soft_cap=cap, window=window)))
    got = ruled(q, pool, table, start)
    np.testing.assert_allclose(got, out, rtol=0, atol=1e-5)
