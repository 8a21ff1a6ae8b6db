"""Kernels of ours on TPU: one that writes K/V into the pool, and jax's ragged paged attention with its softmax's sums.

XLA has a scatter for writing. It reads, changes and writes rows one after the other; here all copies are on their way
at the same time, and the pool is never an operand of anything that could ask for it in another order.

jax's kernel keeps its output in float32 and the sums while it computes, and writes the rounded output alone. Its body
is called as it is, and what it kept is written beside.

This module loads the TPU kernel language, which other devices never need: import it where it is used.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as library
from jaxtyping import Array, Float, Int, Num

from lockstep.models.attention.page_ops import to_pool
from lockstep.models.attention.softmax import Partial
from lockstep.models.attention.tpu_blocks import Rows

NAME = "write_kv"
"""The name of the kernel that writes, in a compiled program."""

_LANES = 128


def write_entries(
    pool: Num[Array, "entry ..."], index: Int[Array, " row"], rows: Float[Array, "row ..."]
) -> Num[Array, "entry ..."]:
    """Return the pool with ``pool[index[i]] = rows[i]``, in its own memory where the caller donates it.

    Where several rows have the same index, the entry has bytes of any of them.

    Args:
        pool: The entries. The last two axes of an entry are its tiles, so that an entry is contiguous in memory.
        index: The entry of each row; must be within the pool.
        rows: The rows, which are rounded to the dtype of the pool.
    """
    count, stored = rows.shape[0], to_pool(rows, pool.dtype)

    def kernel(index: Any, rows: Any, _: Any, written: Any, arrived: Any) -> None:
        def copy(row: Array) -> Any:
            return pltpu.make_async_copy(rows.at[row], written.at[index[row]], arrived)

        jax.lax.fori_loop(0, count, lambda row, _: copy(row).start(), None)
        jax.lax.fori_loop(0, count, lambda row, _: copy(row).wait(), None)

    memory = pl.BlockSpec(memory_space=pl.ANY)
    written: Array = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[memory, memory],
            out_specs=memory,
            grid=(1,),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={2: 0},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * stored.nbytes),
        name=NAME,
    )(index.astype(jnp.int32), stored, pool)
    return written


def partial_attention(
    q: Float[Array, "token q_head head"],
    pool: Num[Array, "pool_page page_size two_kv_heads head"],
    rows: Rows,
    *,
    num_kv_pages_per_block: int,
    num_queries_per_block: int,
    vmem_limit_bytes: int,
    **options: Any,
) -> Partial:
    """Attend as ``ragged_paged_attention`` does, whose arguments these are; ``options`` are those of its kernel."""
    tokens, q_heads, head = q.shape
    page_size, two_kv_heads = pool.shape[1:3]
    group = 2 * q_heads // two_kv_heads
    q_heads_at_once, two_kv_heads_at_once = library.get_min_heads_per_blk(q_heads, two_kv_heads, q.dtype, pool.dtype)
    kv_heads_at_once = two_kv_heads_at_once // 2
    queries, blocks = num_queries_per_block, -(-tokens // num_queries_per_block)
    body: Any = functools.partial(library.ragged_paged_attention_kernel, **options)

    def attend(*refs: Any) -> None:
        *inputs, out, lse, kv, arrived, total, largest, kept, rounded = refs
        body(*inputs, rounded, kv, arrived, total, largest, kept)
        out[...] = kept[...]
        lse[...] = largest[...] + jnp.log(total[...])

    of_queries = pl.BlockSpec((queries, q_heads_at_once, head), lambda heads, block, *_: (block, heads, 0))
    of_sums = pl.BlockSpec((kv_heads_at_once, queries * group, _LANES), lambda heads, block, *_: (heads, block, 0))
    sums = jax.ShapeDtypeStruct((two_kv_heads // 2, blocks * queries * group, _LANES), jnp.float32)
    kept = (queries, q_heads_at_once, head)
    # Two blocks of each output are on their way beside what the kernel has without them.
    more = 2 * 4 * (queries * q_heads_at_once * (head + _LANES)) + queries * q_heads_at_once * head * q.dtype.itemsize
    out, lse = pl.pallas_call(
        attend,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            in_specs=[of_queries, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[of_queries, of_sums],
            grid=(q_heads // q_heads_at_once, blocks),
            scratch_shapes=[
                pltpu.VMEM((2, num_kv_pages_per_block, page_size, two_kv_heads_at_once, head), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                *(pltpu.VMEM((kv_heads_at_once, queries * group, _LANES), jnp.float32) for _ in range(2)),
                pltpu.VMEM(kept, jnp.float32),
                pltpu.VMEM(kept, q.dtype),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes + more
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, jnp.float32), sums],
        name="partial_attention",
    )(*rows[:3], jnp.zeros(2, jnp.int32), rows.num_sequences, q, pool)
    lse = lse[..., 0].reshape(-1, blocks * queries, group)[:, :tokens].swapaxes(0, 1)
    return Partial(out, lse.reshape(tokens, q_heads))
