"""Attention over a laid-out context equals paged attention over the same pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.kernels import Scores, attend_context, extend_context, lay_out_context, paged_attention
from lockstep.kernels import context as module

LAYERS, SLOTS, PAGES, PAGE_SIZE, KV_HEADS, GROUP, HEAD = 2, 3, 5, 4, 2, 3, 8
POOL_PAGES = SLOTS * PAGES + 1


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((LAYERS * POOL_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD)).astype(np.float32)
    page_table = rng.permutation(np.arange(1, POOL_PAGES)).reshape(SLOTS, PAGES).astype(np.int32)
    q = rng.standard_normal((SLOTS, KV_HEADS, GROUP, HEAD)).astype(np.float32)
    kv = rng.standard_normal((SLOTS, 2 * KV_HEADS, HEAD)).astype(np.float32)
    return pool, page_table, q, kv


@pytest.mark.parametrize("chunk", [PAGES * PAGE_SIZE, 8, 4])
@pytest.mark.parametrize("position", [(0, 0, 0), (0, 7, 19), (8, 3, 12)])
@pytest.mark.parametrize("rules", [Scores(), Scores(soft_cap=2.0, window=5)])
def test_it_equals_paged_attention(arrays, chunk, position, rules, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    pool, page_table, q, kv = arrays
    at = np.array(position, np.int32)
    for layer in range(LAYERS):
        pages = layer * POOL_PAGES + page_table
        written = pool.copy()
        written[pages[np.arange(SLOTS), at // PAGE_SIZE], at % PAGE_SIZE] = kv
        expected = paged_attention(
            jnp.asarray(q)[:, None], jnp.asarray(written), jnp.asarray(pages), jnp.asarray(at), rules
        )

        def attend(pool, page_table, q, kv, at, layer=layer):
            context = lay_out_context(pool, page_table, at, LAYERS)
            return attend_context(q, extend_context(context, jnp.int32(layer), kv, at), jnp.int32(layer), at, rules)

        got = jax.jit(attend)(pool, page_table, q, kv, at)
        np.testing.assert_allclose(got, expected[:, 0], rtol=1e-5, atol=1e-6)


def test_chunks_beyond_the_longest_sequence_are_not_read(arrays, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    pool, page_table, q, _ = arrays
    lengths = jnp.full(page_table.shape[0], PAGES * PAGE_SIZE)
    context = lay_out_context(jnp.asarray(pool), jnp.asarray(page_table), lengths, LAYERS)
    # NaN would spread through a masked position: weight 0 times NaN is NaN.
    broken = module.Context(*(array.at[:, 2:].set(jnp.nan) for array in context))
    at = jnp.array([3, 7, 0], jnp.int32)
    layer = jnp.int32(1)
    np.testing.assert_array_equal(
        attend_context(jnp.asarray(q), broken, layer, at), attend_context(jnp.asarray(q), context, layer, at)
    )
