"""A step of one layer, which writes K/V and attends, compiles for every generation with pools in 16 and in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.models.attention import Heads, TpuAttention, select_attention
from lockstep.models.attention.kv import PagedKv
from lockstep.models.attention.tpu_blocks import BlockKey, blocks_for, stored_heads
from lockstep.models.attention.tpu_kernels import NAME
from lockstep.plan.traffic import copies
from lockstep.xla import Hlo, collectives, topology

SLICES = {"v4": "v4-8", "v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4"}
HEADS = Heads(kv_heads=2, group=4, head_size=128)
# A copy of the pool would not fit in the vector memory of any generation.
LAYERS, PAGES, PAGE_SIZE, SLOTS, WIDTH = 2, 4096, 64, 16, 4


@pytest.mark.parametrize(
    ("generation", "kv_dtype"),
    [
        ("v4", "bfloat16"),
        ("v5p", "float8_e4m3fn"),
        *(pytest.param(name, "float8_e4m3fn", marks=pytest.mark.slow) for name in SLICES if name != "v5p"),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in SLICES if name != "v4"),
    ],
)
def test_a_step_writes_into_the_pool_in_place(generation, kv_dtype):
    """Both kernels take the pool as it is: no copy of it, in another dtype or order, is in the program."""
    mesh = Mesh(np.array(topology(SLICES[generation]).devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    stored = PagedKv(kv_heads=stored_heads(HEADS.kv_heads, jnp.dtype(kv_dtype).itemsize), head_size=128)
    key = BlockKey(
        generation=generation,
        q_heads=stored.kv_heads * HEADS.group,
        kv_heads=stored.kv_heads,
        head_size=stored.head_size,
        page_size=PAGE_SIZE,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
    )
    decode, prefill = blocks_for(key)
    attention = TpuAttention(
        heads=HEADS, stored_kv_heads=stored, page_size=PAGE_SIZE, decode_blocks=decode, prefill_blocks=prefill
    )

    def struct(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def step(pool, q, kv, layer, table, position):
        cache = attention.begin_decode(pool, table, position, LAYERS)
        page = layer * PAGES + table[jnp.arange(SLOTS), position // PAGE_SIZE]
        cache = attention.write(cache, layer, page[:, None], position[:, None], kv)
        found = attention.decode(q, cache, layer, layer * PAGES + table, position, jnp.ones(SLOTS, bool))
        return attention.end_decode(cache), found

    shape = (LAYERS * PAGES, PAGE_SIZE, 2 * stored.kv_heads, stored.head_size)
    with jax.set_mesh(mesh):  # the kernel asks it for the kind of TPU
        compiled = (
            jax.jit(step, donate_argnums=0)
            .lower(
                struct(*shape, dtype=kv_dtype),
                struct(SLOTS, 1, HEADS.kv_heads, HEADS.group, HEADS.head_size, dtype="bfloat16"),
                struct(SLOTS, 1, 2 * HEADS.kv_heads, HEADS.head_size, dtype="bfloat16"),
                struct(),
                struct(SLOTS, WIDTH),
                struct(SLOTS),
            )
            .compile()
        )
    text, bytes_ = compiled.as_text(), int(np.prod(shape)) * jnp.dtype(kv_dtype).itemsize
    assert text.count('custom_call_target="tpu_custom_call"') == 2 and NAME in text
    assert compiled.memory_analysis().alias_size_in_bytes == bytes_
    assert compiled.memory_analysis().temp_size_in_bytes < bytes_ / 2
    assert not copies(Hlo(text, ()), shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "generation", ["v5p", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("v4", "v5e", "v6e"))]
)
def test_devices_that_split_positions_write_and_attend_in_place(generation):
    """Two devices have half of the pool each; queries are gathered and results exchanged, and nothing else is sent."""
    mesh = Mesh(np.array(topology(SLICES[generation]).devices[:2]), ("x",), axis_types=(AxisType.Auto,))
    heads = Heads(kv_heads=1, group=4, head_size=128, context=2, context_axes=("x",))
    attention = select_attention(mesh.devices[0], heads, page_size=PAGE_SIZE, dtype=jnp.dtype("bfloat16"))
    everywhere, by_head, by_query_head = (PartitionSpec(*[None] * n, *["x"] * (n > 0)) for n in (0, 2, 3))

    def struct(*shape, dtype="int32", spec=everywhere):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def step(pool, q, kv, layer, table, position):
        cache = attention.begin_decode(pool, table, position, LAYERS)
        page = layer * PAGES + table[jnp.arange(SLOTS), position // PAGE_SIZE]
        cache = attention.write(cache, layer, page[:, None], position[:, None], kv)
        found = attention.decode(q, cache, layer, layer * PAGES + table, position, jnp.ones(SLOTS, bool))
        pool = attention.end_decode(cache)
        rows = attention.begin_prefill(position // PAGE_SIZE * PAGE_SIZE, table, jnp.ones(SLOTS, bool))
        many = jnp.repeat(q, PAGE_SIZE, axis=1)
        return pool, found, attention.prefill(many, pool, layer, layer * PAGES, rows)

    shape = (LAYERS * PAGES, PAGE_SIZE // 2, 2, 128)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(by_head, by_query_head, *[everywhere] * 4),
        out_specs=(by_head, by_query_head, by_query_head),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(mapped, donate_argnums=0)
            .lower(
                struct(*shape[:2], 2 * shape[2], 128, dtype="bfloat16", spec=by_head),
                struct(SLOTS, 1, 1, 8, 128, dtype="bfloat16", spec=by_query_head),
                struct(SLOTS, 1, 2, 128, dtype="bfloat16"),
                struct(),
                struct(SLOTS, WIDTH),
                struct(SLOTS),
            )
            .compile()
        )
    text, bytes_ = compiled.as_text(), int(np.prod(shape)) * 2
    assert text.count('custom_call_target="tpu_custom_call"') == 4, "write, decode, and each half of the queries"
    assert compiled.memory_analysis().alias_size_in_bytes == bytes_
    assert compiled.memory_analysis().temp_size_in_bytes < bytes_ / 2
    hlo = Hlo(text, ())
    assert not copies(hlo, shape)
    assert sorted(one.kind for one in collectives(hlo, 2)) == ["all-gather", "all-to-all", "all-to-all"]
