"""Attention over a gathered context equals paged attention over the same pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models.attention import (
    Heads,
    ScoreModifier,
    XlaAttention,
    attend_context,
    extend_context,
    gather_context,
    paged_attention,
)
from lockstep.models.attention import contiguous_kv as module

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


@functools.cache
def paged(modifier):
    return jax.jit(functools.partial(paged_attention, modifier=modifier))


@pytest.mark.parametrize("chunk", [PAGES * PAGE_SIZE, 8, 4])
@pytest.mark.parametrize(
    "position", [(0, 7, 19), *(pytest.param(each, marks=pytest.mark.slow) for each in [(0, 0, 0), (8, 3, 12)])], ids=str
)
@pytest.mark.parametrize("modifier", [ScoreModifier(), ScoreModifier(soft_cap=2.0, window=5)])
def test_it_equals_paged_attention(arrays, chunk, position, modifier, monkeypatch):
    monkeypatch.setattr(module, "CONTEXT_CHUNK", chunk)
    pool, page_table, q, kv = arrays
    at = np.array(position, np.int32)

    @jax.jit
    def attend(pool, page_table, q, kv, at, layer):
        context = gather_context(pool, page_table, at, LAYERS)
        context = extend_context(context, layer, kv[:, None], at[:, None])
        return attend_context(q[:, None], context, layer, at, modifier)

    for layer in range(LAYERS):
        pages = layer * POOL_PAGES + page_table
        written = pool.copy()
        written[pages[np.arange(SLOTS), at // PAGE_SIZE], at % PAGE_SIZE] = kv
        expected = paged(modifier)(q[:, None], written, pages, at)
        got = attend(pool, page_table, q, kv, at, np.int32(layer))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [PAGES * PAGE_SIZE, 8])
@pytest.mark.parametrize("modifier", [ScoreModifier(), ScoreModifier(soft_cap=2.0, window=5)])
def test_several_positions_are_as_one_after_the_other(arrays, chunk, modifier, monkeypatch):
    """The last queries lie beyond the context: they are left out, and change nothing."""
    monkeypatch.setattr(module, "CONTEXT_CHUNK", chunk)
    pool, page_table = (jnp.asarray(each) for each in arrays[:2])
    rng = np.random.default_rng(3)
    start, queries, layer = jnp.array([0, 7, 17], jnp.int32), 5, jnp.int32(1)
    q = jnp.asarray(rng.standard_normal((SLOTS, queries, KV_HEADS, GROUP, HEAD)), jnp.float32)
    kv = jnp.asarray(rng.standard_normal((SLOTS, queries, 2 * KV_HEADS, HEAD)), jnp.float32)

    @jax.jit
    def together(pool):
        context = gather_context(pool, page_table, start, LAYERS)
        context = extend_context(context, layer, kv, start[:, None] + jnp.arange(queries))
        return context, attend_context(q, context, layer, start, modifier)

    @jax.jit
    def step(context, kv, q, at):
        context = extend_context(context, layer, kv, at[:, None])
        return context, attend_context(q, context, layer, at, modifier)

    filled, got = together(pool)
    context = jax.jit(lambda: gather_context(pool, page_table, start, LAYERS))()
    for i in range(queries):
        within = np.asarray(start + i < PAGES * PAGE_SIZE)
        context, want = step(context, kv[:, i : i + 1], q[:, i : i + 1], start + i)
        np.testing.assert_allclose(got[within, i], want[within, 0], rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, filled, context)


def test_chunks_beyond_the_longest_sequence_are_not_read(arrays, monkeypatch):
    monkeypatch.setattr(module, "CONTEXT_CHUNK", 4)
    pool, page_table, q, _ = arrays
    lengths = jnp.full(page_table.shape[0], PAGES * PAGE_SIZE)
    # Functions of their own: jax would take what it has traced of the same one with chunks of another size.
    context = jax.jit(lambda *given: gather_context(*given, lengths, LAYERS))(pool, page_table)
    # NaN would spread through a masked position: weight 0 times NaN is NaN.
    broken = module.Context(*(array.at[:, 2:].set(jnp.nan) for array in context))
    at = jnp.array([3, 7, 0], jnp.int32)
    layer = jnp.int32(1)
    attend = jax.jit(lambda *given: attend_context(*given))
    np.testing.assert_array_equal(*(attend(q[:, None], one, layer, at) for one in (broken, context)))


def test_a_page_at_a_time_is_the_same(arrays):
    """What the TPU compiler gets for heads that its kernel does not take."""
    pool, page_table, q, kv = (jnp.asarray(array) for array in arrays)
    heads = Heads(kv_heads=KV_HEADS, group=GROUP, head_size=HEAD)
    rows = (
        jnp.broadcast_to(kv[:, None], (SLOTS, PAGE_SIZE, *kv.shape[1:])) * jnp.arange(1, PAGE_SIZE + 1)[:, None, None]
    )
    at, layer = jnp.array([3, 19, 8], jnp.int32), jnp.int32(1)

    def run(attention):
        filled = attention.copy_pages(
            attention.write_pages(pool, page_table[:, 0], rows), page_table[:, 0], page_table[:, 1]
        )
        cache = attention.begin_decode(filled, page_table, at, LAYERS)
        page = POOL_PAGES + page_table[jnp.arange(SLOTS), at // PAGE_SIZE]
        cache = attention.write(cache, layer, page[:, None], at[:, None], kv[:, None])
        found = attention.decode(q[:, None], cache, layer, POOL_PAGES + page_table, at, at > 0)
        table = attention.begin_prefill(at, page_table, at > 0)
        prefilled = attention.prefill(q[:, None], filled, jnp.int32(1), jnp.int32(POOL_PAGES), table)
        return filled, attention.end_decode(cache), found, prefilled

    whole = jax.jit(lambda: run(XlaAttention(heads=heads)))()
    paged = jax.jit(lambda: run(XlaAttention(heads=heads, page_by_page=True)))()
    assert not np.array_equal(whole[0], pool) and np.all(np.isfinite(whole[3]))
    for one, other in zip(whole[:2], paged[:2], strict=True):
        np.testing.assert_array_equal(one, other)  # pools
    for one, other in zip(whole[2:], paged[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # summed in another order
