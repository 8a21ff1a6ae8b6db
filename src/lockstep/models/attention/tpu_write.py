"""Writes K/V into the pool on TPU by a kernel that copies each entry to its place and touches nothing else.

XLA has a scatter for this. It reads, changes and writes rows one after the other; here all copies are on their way at
the same time, and the pool is never an operand of anything that could ask for it in another order.

This module loads the TPU kernel language, which other devices never need: import it where it is used.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from lockstep.models.attention.page_ops import to_pool

NAME = "write_kv"
"""The name of the kernel in a compiled program."""


def write_entries(
    pool: Num[Array, "entry ..."], index: Int[Array, " row"], rows: Float[Array, "row ..."]
) -> Num[Array, "entry ..."]:
    """Returns the pool with ``pool[index[i]] = rows[i]``, in its own memory where the caller donates it.

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
