"""Decode attention without a paged kernel: each slot's pages are laid end to end once per launch, then read in place.

Gathering pages at every step copies the whole context at every step. A decode launch runs many steps on the same
sequences, so one copy at its start is shared by all of them; what the steps add is written to both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from lockstep.attention.page_ops import TakePages, gather_pages
from lockstep.attention.softmax import Scores, attend

CHUNK = 128
"""Positions attended at a time."""


class Context(NamedTuple):
    """K and V of all layers, as the pool has them; a chunk of positions of all slots is contiguous, so that it is read
    where it lies.
    """

    k: Shaped[Array, "layer chunk slot kv_head position stored_head"]
    v: Shaped[Array, "layer chunk slot kv_head position stored_head"]


def gather_context(
    pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"],
    page_table: Int[Array, "slot page"],
    lengths: Int[Array, " slot"],
    num_layers: int,
    take: TakePages = gather_pages,
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
        take: reads pages.

    Returns:
        Positions up to what the page table holds, rounded up to whole chunks.
    """
    slots, num_pages = page_table.shape
    page_size, two_kv_heads, head = pool.shape[1:]
    pages = min(max(CHUNK // page_size, 1), num_pages)
    num_chunks = -(-num_pages // pages)
    padded = jnp.pad(page_table, ((0, 0), (0, num_chunks * pages - num_pages)))

    # A layer at a time: the chunk on its way is small, and nothing of it is carried from one turn to the next.
    def copy(turn: Array, context: Context) -> Context:
        index, layer = turn // num_layers, turn % num_layers
        table = jax.lax.dynamic_slice_in_dim(padded, index * pages, pages, axis=1)
        chunk = take(pool, layer * (pool.shape[0] // num_layers) + table)
        heads = chunk.reshape(slots, pages * page_size, two_kv_heads // 2, 2, head)
        k, v = heads.transpose(3, 0, 2, 1, 4)
        mine = index * pages * page_size + jnp.arange(pages * page_size) < lengths[:, None]
        v = jnp.where(mine[:, None, :, None], v, 0)
        at = (layer, index, 0, 0, 0, 0)
        return Context(
            jax.lax.dynamic_update_slice(context.k, k[None, None], at),
            jax.lax.dynamic_update_slice(context.v, v[None, None], at),
        )

    shape = (num_layers, num_chunks, slots, two_kv_heads // 2, pages * page_size, head)
    empty = Context(jnp.zeros(shape, pool.dtype), jnp.zeros(shape, pool.dtype))
    return jax.lax.fori_loop(0, num_layers * -(-jnp.max(lengths) // (pages * page_size)), copy, empty)


def extend_context(
    context: Context,
    layer: Int[Array, ""],
    kv: Shaped[Array, "slot two_kv_heads stored_head"],
    position: Int[Array, " slot"],
) -> Context:
    """Writes one position per slot."""
    chunk, offset = jnp.divmod(position, context.k.shape[4])
    at = (layer, chunk, jnp.arange(kv.shape[0]), slice(None), offset)
    return Context(
        context.k.at[at].set(kv[:, 0::2].astype(context.k.dtype)),
        context.v.at[at].set(kv[:, 1::2].astype(context.v.dtype)),
    )


def attend_context(
    q: Float[Array, "slot kv_head group head"],
    context: Context,
    layer: Int[Array, ""],
    position: Int[Array, " slot"],
    rules: Scores = Scores(),  # noqa: B008  (frozen)
) -> Float[Array, "slot kv_head group head"]:
    """Attends one query per slot to the positions up to and including its own; softmax in float32."""

    def read(index: Array | int) -> tuple[Array, Array]:
        first = (layer, index, 0, 0, 0, 0)
        k, v = (jax.lax.dynamic_slice(a, first, (1, 1, *a.shape[2:]))[0, 0] for a in context)
        return k, v

    every = jnp.broadcast_to(position[:, None], (q.shape[0], q.shape[2]))
    return attend(q, every, read, context.k.shape[1], context.k.shape[4], rules)
