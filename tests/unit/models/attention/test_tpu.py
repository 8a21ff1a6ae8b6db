"""The TPU attention path, through jax's own kernel in an interpreter, equals attention in plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.models.attention import Heads, TpuAttention, XlaAttention
from lockstep.models.attention.kv import PagedKv
from lockstep.models.attention.page_ops import to_pool
from lockstep.models.attention.tpu_blocks import Blocks, stored_head_size, stored_heads
from lockstep.placement.device import BYTE, FP8, as_numbers
from tests.interpret import kernel_on_cpu
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.models import FAMILIES, mesh_of, mixed_requests, model_on

PAGE_SIZE, PAGES, LAYERS = 8, 12, 2
FLOAT32 = jnp.dtype(jnp.float32)


def attentions(heads: Heads, pages: int, queries: int, itemsize: int = 4) -> tuple[XlaAttention, TpuAttention]:
    blocks = Blocks(pages=pages, queries=queries, vmem_limit=2**24, known=True)
    kv_heads = stored_heads(heads.kv_heads, itemsize)
    stored = PagedKv(kv_heads=kv_heads, head_size=stored_head_size(heads.head_size))
    kernel = TpuAttention(
        heads=heads, stored_kv_heads=stored, page_size=PAGE_SIZE, decode_blocks=blocks, prefill_blocks=blocks
    )
    return XlaAttention(heads=heads), kernel


def pool_of(attention: Any, heads: Heads, dtype: jnp.dtype = FLOAT32) -> jax.Array:
    """The same numbers in either form; the null page too has some."""
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((LAYERS * PAGES, PAGE_SIZE, 2 * heads.kv_heads, heads.head_size), np.float32)
    by_xla = dtype == FP8 and isinstance(attention, XlaAttention)
    return to_pool(attention.pack(jnp.asarray(kv)), BYTE if by_xla else dtype)


# Heads that the kernel takes as they are; an odd number of heads; a head size of 64 and of 96.
HEADS = [(2, 2, 128), (3, 2, 64), (1, 4, 96)]


@pytest.mark.parametrize(
    ("kv_heads", "group", "head"),
    [HEADS[1], *(pytest.param(*heads, marks=pytest.mark.slow) for heads in (HEADS[0], HEADS[2]))],
)
@pytest.mark.parametrize(
    ("kv_dtype", "windows", "sinks"),
    [
        pytest.param(FLOAT32, None, False, marks=pytest.mark.slow),
        (FLOAT32, (None, 6), True),
        pytest.param(FP8, None, False, marks=pytest.mark.slow),
    ],
    ids=["float32", "window and sinks", "fp8"],
)
def test_decode(kv_heads: int, group: int, head: int, kv_dtype: jnp.dtype, windows: Any, sinks: bool) -> None:
    heads = Heads(kv_heads=kv_heads, group=group, head_size=head, windows=windows, sinks=sinks)
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.standard_normal((kv_heads, group)), jnp.float32) if sinks else None
    table = jnp.asarray(rng.permutation(np.arange(1, PAGES))[:9].reshape(3, 3).astype(np.int32))
    position, active = jnp.array([4, 8, 23], jnp.int32), jnp.array([True, False, True])
    q = rng.standard_normal((3, 1, kv_heads, group, head)).astype(np.float32)
    kv = rng.standard_normal((3, 1, 2 * kv_heads, head)).astype(np.float32)
    layer = jnp.int32(1)

    def run(attention: Any) -> tuple[jax.Array, jax.Array]:
        @jax.jit
        def step(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
            cache = attention.begin_decode(pool, table, position, LAYERS)
            page = layer * PAGES + jnp.where(active, table[jnp.arange(3), position // PAGE_SIZE], 0)
            cache = attention.write(cache, layer, page[:, None], position[:, None], jnp.asarray(kv))
            attended = attention.decode(jnp.asarray(q), cache, layer, layer * PAGES + table, position, active, scores)
            return attended, attention.end_decode(cache)

        return step(pool_of(attention, heads, kv_dtype))

    xla, kernel = attentions(heads, pages=2, queries=2, itemsize=kv_dtype.itemsize)
    want, want_pool = run(xla)
    with kernel_on_cpu():
        got, got_pool = run(kernel)
    np.testing.assert_allclose(got[active], want[active], rtol=1e-5, atol=1e-5)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got_pool, as_numbers(kernel.pack(want_pool)))


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "group", "head"), [HEADS[0], pytest.param(*HEADS[1], marks=pytest.mark.nightly)])
def test_several_positions_of_each_slot(kv_heads: int, group: int, head: int) -> None:
    """An idle slot, one that crosses a page, and one whose last queries lie beyond the table, on the null page."""
    heads, queries = Heads(kv_heads=kv_heads, group=group, head_size=head), 5
    rng = np.random.default_rng(1)
    table = jnp.asarray(rng.permutation(np.arange(1, PAGES))[:9].reshape(3, 3).astype(np.int32))
    position, active = jnp.array([6, 8, 21], jnp.int32), jnp.array([True, False, True])
    at = position[:, None] + jnp.arange(queries)
    used = active[:, None] & (at < 24)
    q = rng.standard_normal((3, queries, kv_heads, group, head)).astype(np.float32)
    kv = rng.standard_normal((3, queries, 2 * kv_heads, head)).astype(np.float32)
    layer = jnp.int32(1)

    def run(attention: Any) -> tuple[jax.Array, jax.Array]:
        @jax.jit
        def step(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
            cache = attention.begin_decode(pool, table, position, LAYERS)
            pages = jnp.take_along_axis(table, at // PAGE_SIZE, axis=1, mode="clip")
            page = layer * PAGES + jnp.where(used, pages, 0)
            cache = attention.write(cache, layer, page, at, jnp.asarray(kv))
            found = attention.decode(jnp.asarray(q), cache, layer, layer * PAGES + table, position, active)
            return found, attention.end_decode(cache)

        return step(pool_of(attention, heads))

    xla, kernel = attentions(heads, pages=2, queries=4)
    want, want_pool = run(xla)
    with kernel_on_cpu():
        got, got_pool = run(kernel)
    np.testing.assert_allclose(got[used], want[used], rtol=1e-5, atol=1e-5)
    mine = np.arange(LAYERS * PAGES) != PAGES  # of several writers to the null page any one wins
    np.testing.assert_array_equal(got_pool[mine], kernel.pack(want_pool)[mine])


@functools.cache
def rows() -> tuple[np.ndarray, ...]:
    """A prompt of 2.5 pages in three rows, another in one row from its second page on, and two unused rows."""
    start = np.array([0, 8, 16, 8, 0, 0], np.int32)
    table = np.zeros((6, 4), np.int32)
    table[:3, :3] = 7, 2, 9
    table[3, :2] = 7, 4  # shares its first page
    page = np.array([7, 2, 9, 4, 0, 0], np.int32)
    return start, table, page


@pytest.mark.parametrize(
    "queries", [3, pytest.param(8, marks=pytest.mark.nightly), pytest.param(64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("kv_heads", "group", "head", "sinks"), [(*HEADS[0], False), (*HEADS[1], True)])
@pytest.mark.slow
def test_prefill(kv_heads: int, group: int, head: int, sinks: bool, queries: int) -> None:
    heads = Heads(kv_heads=kv_heads, group=group, head_size=head, sinks=sinks)
    start, table, page = rows()
    rng = np.random.default_rng(2)
    q = rng.standard_normal((6, PAGE_SIZE, kv_heads, group, head)).astype(np.float32)
    scores = jnp.asarray(rng.standard_normal((kv_heads, group)), jnp.float32) if sinks else None
    first = jnp.int32(PAGES)

    def run(attention: Any) -> jax.Array:
        @jax.jit
        def launch(pool: jax.Array) -> jax.Array:
            arranged = attention.begin_prefill(jnp.asarray(start), jnp.asarray(table), jnp.asarray(page != 0))
            attended: jax.Array = attention.prefill(jnp.asarray(q), pool, jnp.int32(0), first, arranged, scores)
            return attended

        return launch(pool_of(attention, heads))

    xla, kernel = attentions(heads, pages=2, queries=queries)
    want = run(xla)
    with kernel_on_cpu():
        got = run(kernel)
    np.testing.assert_allclose(got[:4], want[:4], rtol=1e-5, atol=1e-5)
    assert not got[4:].any(), "of unused rows zeros, not what the memory held"


def test_rows_that_continue_each_other_are_one_sequence() -> None:
    _, kernel = attentions(Heads(kv_heads=2, group=1, head_size=128), 2, 8)
    start, table, page = rows()
    got = kernel.begin_prefill(jnp.asarray(start), jnp.asarray(table), jnp.asarray(page != 0))
    assert got.num_sequences.tolist() == [2]
    assert got.q_starts.tolist()[:3] == [0, 24, 32]
    assert got.lengths.tolist()[:2] == [24, 16]
    np.testing.assert_array_equal(got.page_table[:2], table[[0, 3]])


def test_a_launch_without_rows_still_has_a_sequence() -> None:
    # The kernel begins to copy the first sequence's pages whether there is one or not, and waits only if there is.
    _, kernel = attentions(Heads(kv_heads=2, group=1, head_size=128), 2, 8)
    nothing = np.zeros(3, np.int32)
    got = kernel.begin_prefill(jnp.asarray(nothing), jnp.zeros((3, 4), jnp.int32), jnp.asarray(nothing > 0))
    assert (got.num_sequences.tolist(), got.lengths.tolist()[:1], got.q_starts.tolist()[:2]) == (
        [1],
        [PAGE_SIZE],
        [0, PAGE_SIZE],
    )


CASES: list[Any] = [
    pytest.param(
        "qwen3",
        "1,2,2",
        {"tensor": 2},
        {"page_size": 8, "max_prefill_size": 32, "max_seqs": 6},
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "llama", "1,2,1", {"tensor": 1}, {"page_size": 16, "kv_cache_dtype": "fp8"}, marks=pytest.mark.nightly
    ),
    pytest.param("llama", "1,2,1", {"tensor": 1}, {"page_size": 16, "max_pages": 9}, marks=pytest.mark.nightly),
    pytest.param("tied", "1,2,2", "training", {"page_size": 8, "max_prefill_size": 8}, marks=pytest.mark.nightly),
    pytest.param("gemma3", "1,2,1", {"tensor": 1}, {"page_size": 8, "max_prefill_size": 16}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "mesh", "layout", "options"), CASES)
def test_tokens_through_the_kernel(family: str, mesh: str, layout: Any, options: dict[str, Any]) -> None:
    fp8 = options.get("kv_cache_dtype") == "fp8"
    want = oracle_completions(model_on("1,4,1", FAMILIES[family]), mixed_requests(), fp8_cache=fp8)
    with kernel_on_cpu():
        engine = Engine(EngineConfig(layout=layout, **options), mesh_of(mesh))
        got = engine.generate(model_on(mesh, FAMILIES[family]), mixed_requests())
    assert_same_tokens(want, got)
    assert_same_logprobs(want, got)
