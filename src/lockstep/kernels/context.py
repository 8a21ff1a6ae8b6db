"""Decode attention without a paged kernel: each slot's pages are laid end to end once per launch, then read in place.

Gathering pages at every step copies the whole context at every step. A decode launch runs many steps on the same
sequences, so one copy at its start is shared by all of them; what the steps add is written to both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 512
"""Positions attended at a time; of a longer context, chunks beyond the longest sequence are not read."""


class Context(NamedTuple):
    """K and V of all layers, contiguous per slot and head."""

    k: Float[Array, "layer slot kv_head position head"]
    v: Float[Array, "layer slot kv_head position head"]


def lay_out_context(
    pool: Float[Array, "pool_page page_size two_kv_heads head"], page_table: Int[Array, "slot page"], num_layers: int
) -> Context:
    """Copies the pages of each slot end to end.

    Args:
        pool: K/V of all layers, flat: page ``p`` of layer ``l`` is at ``l * pages + p``; K of kv head ``h`` at
            ``2 * h``, V at ``2 * h + 1``.
        page_table: pages of each slot, in order.
        num_layers: of the model.

    Returns:
        Positions up to what the page table holds, rounded up to whole chunks.
    """
    slots, pages = page_table.shape
    length = pages * pool.shape[1]
    padded = length if length <= CHUNK else -(-length // CHUNK) * CHUNK

    def layer(index: Array) -> Context:
        stored = pool[index * (pool.shape[0] // num_layers) + page_table]
        heads = stored.reshape(slots, length, -1, 2, pool.shape[3]).transpose(3, 0, 2, 1, 4)
        k, v = jnp.pad(heads, ((0, 0), (0, 0), (0, 0), (0, padded - length), (0, 0)))
        return Context(k, v)

    return Context(*jax.lax.map(layer, jnp.arange(num_layers)))


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
    """Attends one query per slot to the positions up to and including its own; softmax in float32.

    Beyond a chunk the softmax is accumulated chunk by chunk (Milakov & Gimelshein 2018,
    https://arxiv.org/abs/1805.02867, algorithm 3).
    """
    scale = q.shape[-1] ** -0.5
    length = context.k.shape[3]

    def scores(k: Array, first: Array | int) -> Array:
        found = jnp.einsum("skgh,skth->skgt", q, k, preferred_element_type=jnp.float32) * scale
        visible = first + jnp.arange(k.shape[2]) <= position[:, None]
        return jnp.where(visible[:, None, None], found, -jnp.inf)

    if length <= CHUNK:
        weights = jax.nn.softmax(scores(context.k[layer], 0), axis=-1)
        return jnp.einsum("skgt,skth->skgh", weights.astype(q.dtype), context.v[layer]).astype(q.dtype)

    def chunk(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, out = state
        k, v = (
            jax.lax.dynamic_slice(a, (layer, 0, 0, index * CHUNK, 0), (1, *a.shape[1:3], CHUNK, a.shape[4]))[0]
            for a in context
        )
        found = scores(k, index * CHUNK)
        new_top = jnp.maximum(top, found.max(axis=-1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(found - new_top[..., None])
        added = jnp.einsum("skgt,skth->skgh", weights.astype(q.dtype), v, preferred_element_type=jnp.float32)
        return new_top, mass * shrink + weights.sum(axis=-1), out * shrink[..., None] + added

    # Position 0 is visible to every query and lies in the first chunk, so the running maximum is finite after it.
    lowest = jnp.full(q.shape[:3], jnp.finfo(jnp.float32).min)
    empty = lowest, jnp.zeros_like(lowest), jnp.zeros(q.shape, jnp.float32)
    _, mass, out = jax.lax.fori_loop(0, jnp.max(position) // CHUNK + 1, chunk, empty)
    return (out / mass[..., None]).astype(q.dtype)
