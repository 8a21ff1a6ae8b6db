"""Heads outside the block table get small blocks, and those compile for every generation."""

import jax
import numpy as np
import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.models.attention.tpu_blocks import BlockKey, blocks_for, safe
from lockstep.xla import topology

SLICES = {"v4": "v4-8", "v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4", "tpu7x": "tpu7x-8"}
TOKENS, SEQUENCES, POSITIONS = 64, 16, 1024


@pytest.mark.parametrize("page_size", [pytest.param(16, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize(("head_size", "dtype"), [(128, "float32")])
@pytest.mark.parametrize(
    "generation", [name if name == "v4" else pytest.param(name, marks=pytest.mark.slow) for name in SLICES]
)
def test_small_blocks_compile_for_heads_outside_the_table(generation, head_size, dtype, page_size):
    heads = {"q_heads": 128, "kv_heads": 8, "head_size": head_size}
    key = BlockKey(generation=generation, **heads, page_size=page_size, dtype=dtype, kv_dtype=dtype)
    blocks, prefill = blocks_for(key)
    assert blocks == prefill == safe(key) and not blocks.known
    devices = np.array(topology(SLICES[generation]).devices[:1])
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))

    def struct(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def attend(*arrays):
        return ragged_paged_attention(
            *arrays,
            num_kv_pages_per_block=blocks.pages,
            num_queries_per_block=blocks.queries,
            vmem_limit_bytes=blocks.vmem_limit,
        )

    with jax.set_mesh(mesh):  # the kernel asks it for the kind of TPU
        jax.jit(attend).lower(
            struct(TOKENS, key.q_heads, key.head_size, dtype=key.dtype),
            struct(256, page_size, 2 * key.kv_heads, key.head_size, dtype=key.dtype),
            struct(SEQUENCES),
            struct(SEQUENCES, POSITIONS // page_size),
            struct(SEQUENCES + 1),
            struct(1),
        ).compile()
