"""Attention whose positions are split over devices equals attention of one device that has them all."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from lockstep.models.attention import Heads, ScoreModifier, XlaAttention, select_attention
from lockstep.models.attention.context_parallel import ContextParallelAttention
from lockstep.models.attention.tpu import TpuAttention
from lockstep.models.attention.tpu_blocks import Blocks
from tests.interpret import kernel_on_cpu

SIZE, PAGES, LAYERS, GROUP, HEAD = 8, 10, 2, 4, 16
MODIFIERS = {
    "plain": {},
    "window and cap": {"modifier": ScoreModifier(soft_cap=3.0, window=8)},
    "windows and sinks": {"windows": (4, None), "sinks": True},
}
TABLE = np.array([[7, 2, 9, 4], [3, 8, 1, 0], [6, 0, 0, 0]], np.int32)
POSITION = np.array([21, 16, 1], np.int32)


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@functools.cache
def pool() -> jax.Array:
    """The null page and what lies beyond a sequence have numbers too."""
    return numbers(0, LAYERS * PAGES, SIZE, 2, HEAD)


def split(devices: int, heads: Heads, kernel: bool) -> ContextParallelAttention:
    own = dataclasses.replace(heads, group=GROUP // devices, context=devices, context_axes=("x",))
    found = select_attention(jax.devices()[0], own, page_size=SIZE, dtype=jnp.dtype(jnp.float32))
    assert isinstance(found, ContextParallelAttention)
    if kernel:
        assert isinstance(found.own, TpuAttention)
        blocks = Blocks(pages=2, queries=2, vmem_limit=2**24, known=True)
        found = dataclasses.replace(
            found, own=dataclasses.replace(found.own, decode_blocks=blocks, prefill_blocks=blocks)
        )
    return found


def both(devices: int, heads: Heads, run: Any, q: jax.Array, *, kernel: bool = False) -> tuple[Any, Any]:
    """What ``run`` returns of one device, and of several, whose queries and sinks are joined."""
    sinks = numbers(9, 1, GROUP) if heads.sinks else None
    want = jax.jit(functools.partial(run, XlaAttention(heads=heads)))(pool(), q, sinks)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(AxisType.Auto,))
    one = split(devices, heads, kernel)

    def on_device(pool: jax.Array, q: jax.Array, sinks: Any) -> jax.Array:
        # Position p of a page is the device's where p % devices is its number.
        mine = pool.reshape(len(pool), -1, devices, *pool.shape[2:])
        mine = jax.lax.dynamic_index_in_dim(mine, jax.lax.axis_index("x"), 2, False)
        found: jax.Array = run(one, one.pack(mine), q, sinks)
        return found

    by_group = PartitionSpec(*(None for _ in q.shape[:-2]), "x")
    of_sinks = None if sinks is None else PartitionSpec(None, "x")
    got = jax.jit(
        jax.shard_map(
            on_device, mesh=mesh, in_specs=(PartitionSpec(), by_group, of_sinks), out_specs=by_group, check_vma=False
        )
    )(pool(), q, sinks)
    return want, got


def decode(attention: Any, pool: jax.Array, q: jax.Array, sinks: Any) -> jax.Array:
    table, position, layer = jnp.asarray(TABLE), jnp.asarray(POSITION), jnp.int32(1)
    cache = attention.begin_decode(pool, table, position, LAYERS)
    for step in range(3):  # the second slot begins a page
        at = position + step
        page = layer * PAGES + table[jnp.arange(3), at // SIZE]
        cache = attention.write(cache, layer, page[:, None], at[:, None], numbers(step, 3, 1, 2, HEAD))
    found: jax.Array = attention.decode(q, cache, layer, layer * PAGES + table, position + 2, jnp.ones(3, bool), sinks)
    return found


def verify(attention: Any, pool: jax.Array, q: jax.Array, sinks: Any) -> jax.Array:
    table, position, layer = jnp.asarray(TABLE), jnp.asarray(POSITION), jnp.int32(1)
    at = position[:, None] + jnp.arange(q.shape[1])
    cache = attention.begin_decode(pool, table, position, LAYERS)
    page = layer * PAGES + jnp.take_along_axis(table, at // SIZE, axis=1)
    cache = attention.write(cache, layer, page, at, numbers(3, *at.shape, 2, HEAD))
    found: jax.Array = attention.decode(q, cache, layer, layer * PAGES + table, position, jnp.ones(3, bool), sinks)
    return found


def prefill(attention: Any, pool: jax.Array, q: jax.Array, sinks: Any) -> jax.Array:
    """Three rows of one prompt, and the second of another."""
    table = jnp.asarray(TABLE[[0, 0, 0, 1]])
    start, page = jnp.array([0, 8, 16, 8], jnp.int32), jnp.array([7, 2, 9, 8], jnp.int32)
    layer, first = jnp.int32(1), jnp.int32(PAGES)
    rows = attention.begin_prefill(start, table, jnp.ones(4, bool))
    pool = attention.write_pages(pool, first + page, numbers(4, 4, SIZE, 2, HEAD))
    found: jax.Array = attention.prefill(q, pool, layer, first, rows, sinks)
    return found


CALLS = {"decode": (decode, (3, 1)), "verify": (verify, (3, 5)), "prefill": (prefill, (4, SIZE))}


FAST = (("verify", "windows and sinks", 2), ("prefill", "window and cap", 4))


@pytest.mark.parametrize(
    ("call", "modifier", "devices"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in itertools.product(CALLS, MODIFIERS, (2, 4))
    ],
)
def test_several_devices_attend_as_one(call: str, modifier: str, devices: int) -> None:
    run, shape = CALLS[call]
    heads = Heads(kv_heads=1, group=GROUP, head_size=HEAD, **MODIFIERS[modifier])
    want, got = both(devices, heads, run, numbers(5, *shape, 1, GROUP, HEAD))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("call", [pytest.param("decode", marks=pytest.mark.nightly), "verify", "prefill"])
def test_several_devices_attend_as_one_by_the_kernel(call: str) -> None:
    run, shape = CALLS[call]
    heads = Heads(kv_heads=1, group=GROUP, head_size=HEAD, **MODIFIERS["window and cap"])
    with kernel_on_cpu():
        want, got = both(2, heads, run, numbers(5, *shape, 1, GROUP, HEAD), kernel=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_copies_of_pages_are_of_each_device() -> None:
    def run(attention: Any, pool: jax.Array, q: jax.Array, sinks: Any) -> jax.Array:
        pool = attention.copy_pages(pool, jnp.array([PAGES + 2]), jnp.array([PAGES + 8]))
        return decode(attention, pool, q, sinks)

    want, got = both(2, Heads(kv_heads=1, group=GROUP, head_size=HEAD), run, numbers(5, 3, 1, 1, GROUP, HEAD))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
