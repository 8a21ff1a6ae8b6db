"""Decode attention without a paged kernel: each slot's pages are laid end to end once per launch, then read in place.

Gathering pages at every step copies the whole context at every step. A decode launch runs many steps on the same
sequences, so one copy at its start is shared by all of them; what the steps add is written to both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.kernels.softmax import CHUNK, attend


class Context(NamedTuple):
    """K and V of all layers, contiguous per slot and head."""

    k: Float[Array, "layer slot kv_head position head"]
    v: Float[Array, "layer slot kv_head position head"]


def lay_out_context(
    pool: Float[Array, "pool_page page_size two_kv_heads head"],
    page_table: Int[Array, "slot page"],
    lengths: Int[Array, " slot"],
    num_layers: int,
) -> Context:
    """Copies the pages of each slot end to end, as far as its sequence reaches; V beyond it is zeros.

    What lies on a page from whoever had it before may be anything. Beyond a query it has weight 0, and 0 times infinity
    would be NaN: of K that does not matter, for its scores are replaced.

    Args:
        pool: K/V of all layers, flat: page ``p`` of layer ``l`` is at ``l * pages + p``; K of kv head ``h`` at
            ``2 * h``, V at ``2 * h + 1``.
        page_table: pages of each slot, in order.
        lengths: positions that each slot has.
        num_layers: of the model.

    Returns:
        Positions up to what the page table holds, rounded up to whole chunks.
    """
    slots, num_pages = page_table.shape
    page_size, two_kv_heads, head = pool.shape[1:]
    pages = min(max(CHUNK // page_size, 1), num_pages)
    num_chunks = -(-num_pages // pages)
    padded = jnp.pad(page_table, ((0, 0), (0, num_chunks * pages - num_pages)))
    first_pages = jnp.arange(num_layers) * (pool.shape[0] // num_layers)

    def copy(index: Array, context: Context) -> Context:
        table = jax.lax.dynamic_slice_in_dim(padded, index * pages, pages, axis=1)
        chunk = pool[first_pages[:, None, None] + table]
        heads = chunk.reshape(num_layers, slots, pages * page_size, two_kv_heads // 2, 2, head)
        k, v = heads.transpose(4, 0, 1, 3, 2, 5)
        mine = index * pages * page_size + jnp.arange(pages * page_size) < jnp.reshape(lengths, (-1, 1))
        v = jnp.where(mine[:, None, :, None], v, 0)
        at = (0, 0, 0, index * pages * page_size, 0)
        return Context(jax.lax.dynamic_update_slice(context.k, k, at), jax.lax.dynamic_update_slice(context.v, v, at))

    empty = jnp.zeros((num_layers, slots, two_kv_heads // 2, num_chunks * pages * page_size, head), pool.dtype)
    return jax.lax.fori_loop(0, -(-jnp.max(lengths) // (pages * page_size)), copy, Context(empty, empty))


def extend_context(
    context: Context,
    layer: Int[Array, ""],
    kv: Float[Array, "slot two_kv_heads head"],
    position: Int[Array, " slot"],
) -> Context:
    """Writes one position per slot."""
    rows = jnp.arange(kv.shape[0])
    return Context(
        context.k.at[layer, rows, :, position].set(kv[:, 0::2].astype(context.k.dtype)),
        context.v.at[layer, rows, :, position].set(kv[:, 1::2].astype(context.v.dtype)),
    )


def attend_context(
    q: Float[Array, "slot kv_head group head"],
    context: Context,
    layer: Int[Array, ""],
    position: Int[Array, " slot"],
) -> Float[Array, "slot kv_head group head"]:
    """Attends one query per slot to the positions up to and including its own; softmax in float32."""
    length = context.k.shape[3]
    size = length if length <= CHUNK or length % CHUNK else CHUNK

    def read(index: Array | int) -> tuple[Array, Array]:
        first = (layer, 0, 0, index * size, 0)
        k, v = (jax.lax.dynamic_slice(a, first, (1, *a.shape[1:3], size, a.shape[4]))[0] for a in context)
        return k, v

    every = jnp.broadcast_to(position[:, None], (q.shape[0], q.shape[2]))
    return attend(q, every, read, length // size, size)
