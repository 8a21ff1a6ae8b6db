"""Decode attention without a paged kernel: each slot's pages are gathered into contiguous K/V once per launch.

Gathering pages at every step would copy the whole context at every step. A decode launch runs many steps on the same
sequences, so one copy at its start serves all of them; what the steps add is written to the pool and to the copy.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from lockstep.models.attention.page_ops import ReadKv, gather_kv, keys_and_values, to_pool
from lockstep.models.attention.softmax import ReadChunk, ScoreModifier, attend

CONTEXT_CHUNK = 128
"""Positions attended at a time."""


class Context(NamedTuple):
    """Contiguous K and V of all layers, or the latents that are both, in the dtype of the pool.

    A chunk of positions of all slots is one contiguous block of memory, so that attention reads it without a copy.
    """

    k: Num[Array, "layer chunk slot kv_head position head"]
    v: Num[Array, "layer chunk slot kv_head position head"] | None = None
    """None where K is a latent."""


def gather_context(
    pool: Num[Array, "pool_page page_size two_kv_heads head"],
    page_table: Int[Array, "slot page"],
    lengths: Int[Array, " slot"],
    num_layers: int,
    read_kv: ReadKv = gather_kv,
    layers: Sequence[int] | None = None,
) -> Context:
    """Copy the pages of each slot into contiguous K and V, as far as its sequence reaches; V beyond it is zeros.

    A page may still hold K/V of the sequence that had it before. Beyond a query such V has weight 0, and 0 times
    infinity would be NaN, so it is replaced. Such K needs no care: its scores are masked.

    Args:
        pool: K and V of all layers, flat: page ``p`` of layer ``l`` is at ``l * pages + p``; K of kv head ``h`` at
            ``2 * h``, V at ``2 * h + 1``.
        page_table: The pages of each slot, in order, numbered from the first page of a layer.
        lengths: The number of positions that each slot has in the pool.
        num_layers: The number of layers that the pool has.
        layers: Those to copy, in this order; None for all.

    Returns:
        As many positions as the page table has, rounded up to whole chunks.
    """
    slots, num_pages = page_table.shape
    page_size = pool.shape[1]
    copied_layers = num_layers if layers is None else len(layers)
    pages = min(max(CONTEXT_CHUNK // page_size, 1), num_pages)
    num_chunks = -(-num_pages // pages)
    padded = jnp.pad(page_table, ((0, 0), (0, num_chunks * pages - num_pages)))
    # Half a chunk at a time, where it has halves: the less is copied beyond the longest sequence.
    copied = pages // 2 if pages % 2 == 0 else pages

    # One layer per iteration: what is in flight is small, and nothing but the context is carried to the next one.
    def copy(iteration: Array, context: Context) -> Context:
        first, layer = iteration // copied_layers * copied, iteration % copied_layers
        table = jax.lax.dynamic_slice_in_dim(padded, first, copied, axis=1)
        of_pool = layer if layers is None else jnp.asarray(layers)[layer]
        *k, v = read_kv(pool, of_pool * (pool.shape[0] // num_layers) + table)
        written = first * page_size + jnp.arange(copied * page_size) < lengths[:, None]
        parts = *k, jnp.where(written[:, None, :, None], v, 0)
        at = (layer, first // pages, 0, 0, first % pages * page_size, 0)
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice(whole, part[None, None], at), context, Context(*parts)
        )

    shapes = jax.eval_shape(read_kv, pool, padded[:, :copied])
    shape = (copied_layers, num_chunks, slots, shapes[0].shape[1], pages * page_size, shapes[0].shape[3])
    empty = Context(*(jnp.zeros(shape, pool.dtype) for _ in shapes))
    return jax.lax.fori_loop(0, copied_layers * -(-jnp.max(lengths) // (copied * page_size)), copy, empty)


def extend_context(
    context: Context,
    layer: Int[Array, ""],
    kv: Float[Array, "slot query two_kv_heads head"],
    position: Int[Array, "slot query"],
) -> Context:
    """Write K and V of one or more positions per slot into one layer of the context; those beyond it are left out."""
    chunk, offset = jnp.divmod(position, context.k.shape[4])
    at = (layer, chunk, jnp.arange(kv.shape[0])[:, None], slice(None), offset)
    arrays = jax.tree.leaves(context)
    rows = Context(*(kv[..., part :: len(arrays), :] for part in range(len(arrays))))
    return jax.tree.map(lambda array, row: array.at[at].set(to_pool(row, array.dtype), mode="drop"), context, rows)


def attend_context(
    q: Float[Array, "slot query kv_head group head"],
    context: Context,
    layer: Int[Array, ""],
    position: Int[Array, " slot"],
    modifier: ScoreModifier = ScoreModifier(),  # noqa: B008  (frozen)
    sinks: Float[Array, "kv_head group"] | None = None,
    *,
    partial: bool = False,
    value_size: int | None = None,
) -> Any:
    """Attend one or more queries per slot to the positions up to and including their own, as `attend` does.

    Args:
        q: The queries; query ``i`` of a slot is at ``position + i``. Those beyond the context see all of it.
        position: The position of each slot's first query.
        value_size: See `lockstep.models.attention.kv.PagedKv`.
    """
    slots, queries, kv_heads, group, head = q.shape
    last = context.k.shape[1] * context.k.shape[4] - 1
    positions = jnp.repeat(jnp.minimum(position[:, None] + jnp.arange(queries), last), group, axis=1)
    by_head = q.transpose(0, 2, 1, 3, 4).reshape(slots, kv_heads, queries * group, head)
    read = chunk_reader(context, layer, value_size)
    sinks = None if sinks is None else jnp.tile(sinks, (1, queries))
    chunks, size = context.k.shape[1], context.k.shape[4]
    out = attend(by_head, positions, read, chunks, size, modifier, sinks, partial=partial)
    return by_query(out, queries)


def by_query(attended: Any, queries: int) -> Any:
    """Split ``[sequence, kv_head, query * group, ...]`` into ``[sequence, query, kv_head, group, ...]``."""
    return jax.tree.map(lambda a: a.reshape(*a.shape[:2], queries, -1, *a.shape[3:]).swapaxes(1, 2), attended)


def chunk_reader(context: Context, layer: Int[Array, ""], value_size: int | None) -> ReadChunk:
    """Return what reads chunks of one layer."""

    def read(index: Array | int) -> tuple[Array, Array]:
        first = (layer, index, 0, 0, 0, 0)
        arrays = jax.tree.leaves(context)
        return keys_and_values(
            [jax.lax.dynamic_slice(a, first, (1, 1, *a.shape[2:]))[0, 0] for a in arrays], value_size
        )

    return read
