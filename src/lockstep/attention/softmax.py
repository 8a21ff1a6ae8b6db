"""Softmax attention over a context that is read chunk by chunk, as far as the longest sequence reaches."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.attention.quantized_kv import unpack

type ReadChunk = Callable[[Array | int], tuple[Array, Array]]
"""K and V ``[sequence, kv_head, position, head]`` of the chunk with this number, as they are or as `quantise` makes
them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model does to attention scores beside the causal mask; each None costs nothing.

    Args:
        soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)``.
        window: positions that a query sees, its own among them.
    """

    soft_cap: float | None = None
    window: int | None = None


def attend(
    q: Float[Array, "sequence kv_head query head"],
    position: Int[Array, "sequence query"],
    read: ReadChunk,
    num_chunks: int,
    chunk_size: int,
    rules: Scores = Scores(),
) -> Float[Array, "sequence kv_head query head"]:
    """Attends each query to all positions up to and including its own; softmax in float32.

    Beyond one chunk the softmax is accumulated chunk by chunk (Milakov & Gimelshein 2018,
    https://arxiv.org/abs/1805.02867, algorithm 3).

    Args:
        q: queries of each sequence, those of a kv head together.
        position: of each query.
        read: gives K and V of a chunk.
        num_chunks: that ``read`` knows.
        chunk_size: positions in a chunk.
        rules: soft cap and window.

    Returns:
        In the dtype of ``q``.
    """
    scale = q.shape[-1] ** -0.5

    # Of K and V in 8 bits the whole numbers are multiplied, which any float dtype holds exactly. Their scales belong to
    # positions, so they multiply scores and weights instead, in float32.
    def scores(k: Array, first: Array | int) -> Array:
        if k.dtype == jnp.int8:
            k, size = unpack(k)
            found = jnp.einsum("skqh,skth->skqt", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
            found = found * (size * scale)[:, :, None]
        else:
            found = jnp.einsum("skqh,skth->skqt", q, k, preferred_element_type=jnp.float32) * scale
        if rules.soft_cap is not None:
            found = rules.soft_cap * jnp.tanh(found / rules.soft_cap)
        behind = position[..., None] - (first + jnp.arange(chunk_size))
        visible = behind >= 0 if rules.window is None else (behind >= 0) & (behind < rules.window)
        return jnp.where(visible[:, None], found, -jnp.inf)

    def weighed(weights: Array, v: Array) -> tuple[Array, Array]:
        if v.dtype != jnp.int8:
            return weights.astype(v.dtype), v
        v, size = unpack(v)
        dtype = jnp.float32 if q.dtype == jnp.float16 else q.dtype  # products that small are nothing in float16
        return (weights * size[:, :, None]).astype(dtype), v.astype(dtype)

    if num_chunks == 1:
        k, v = read(0)
        weights, v = weighed(jax.nn.softmax(scores(k, 0), axis=-1), v)
        return jnp.einsum("skqt,skth->skqh", weights, v).astype(q.dtype)

    def chunk(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, out = state
        k, v = read(index)
        found = scores(k, index * chunk_size)
        new_top = jnp.maximum(top, found.max(axis=-1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(found - new_top[..., None])
        added = jnp.einsum("skqt,skth->skqh", *weighed(weights, v), preferred_element_type=jnp.float32)
        return new_top, mass * shrink + weights.sum(axis=-1), out * shrink[..., None] + added

    # The running maximum starts finite, so a chunk of which a query sees nothing adds exactly 0.
    lowest = jnp.full(q.shape[:3], jnp.finfo(jnp.float32).min)
    empty = lowest, jnp.zeros_like(lowest), jnp.zeros(q.shape, jnp.float32)
    _, mass, out = jax.lax.fori_loop(0, jnp.max(position) // chunk_size + 1, chunk, empty)
    return (out / mass[..., None]).astype(q.dtype)
