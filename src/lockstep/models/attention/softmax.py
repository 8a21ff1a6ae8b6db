"""Softmax attention over a context that is read chunk by chunk, as far as the longest sequence reaches."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.placement.device import as_numbers

type ReadChunk = Callable[[Array | int], tuple[Array, Array]]
"""Takes the number of a chunk; returns its K and V ``[sequence, kv_head, position, head]`` as the pool holds them.
V may be narrower."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreModifier:
    """Changes of attention scores besides the causal mask; a field that is None costs nothing.

    Args:
        soft_cap: The soft cap: a score s becomes ``soft_cap * tanh(s / soft_cap)`` (Gemma 2, Riviere et al. 2024,
            https://arxiv.org/abs/2408.00118, section 2). None for no cap.
        window: The sliding window: the number of positions that a query attends to, its own included (Mistral, Jiang
            et al. 2023, https://arxiv.org/abs/2310.06825, section 2). None for all earlier positions. That of a layer
            among layers that differ is a traced number.
    """

    soft_cap: float | None = None
    window: int | Int[Array, ""] | None = None


class Partial(NamedTuple):
    """Attention over some of the positions, in float32, and what is needed to join it with that over the others.

    Args:
        lse: The logarithm of the sum of the exponentials of the scores.
    """

    out: Float[Array, "*batch head"]
    lse: Float[Array, "*batch"]


def attend(
    q: Float[Array, "sequence kv_head query head"],
    position: Int[Array, "sequence query"],
    read: ReadChunk,
    num_chunks: int,
    chunk_size: int,
    modifier: ScoreModifier = ScoreModifier(),
    sinks: Float[Array, "kv_head query"] | None = None,
    *,
    partial: bool = False,
) -> Any:
    """Attend each query to all positions up to and including its own; softmax in float32.

    With more than one chunk the softmax is accumulated chunk by chunk (Milakov & Gimelshein 2018,
    https://arxiv.org/abs/1805.02867, algorithm 3).

    Args:
        sinks: The score of each query for nothing: it takes a part of the softmax and adds no value (gpt-oss; Xiao et
            al. 2023, https://arxiv.org/abs/2309.17453). None for none.
        partial: Whether there are more positions elsewhere.

    Returns:
        The attention output ``[sequence, kv_head, query, value]`` in the dtype of ``q``, or
        `Partial`; a query that sees nothing has 0 and -inf there.
    """
    scale = q.shape[-1] ** -0.5

    def scores(k: Array, first: Array | int) -> Array:
        keys = as_numbers(k).astype(q.dtype)
        logits = jnp.einsum("skqh,skth->skqt", q, keys, preferred_element_type=jnp.float32) * scale
        if modifier.soft_cap is not None:
            logits = modifier.soft_cap * jnp.tanh(logits / modifier.soft_cap)
        distance = position[..., None] - (first + jnp.arange(chunk_size))
        visible = distance >= 0 if modifier.window is None else (distance >= 0) & (distance < modifier.window)
        return jnp.where(visible[:, None], logits, -jnp.inf)

    if num_chunks == 1 and not partial:
        k, v = read(0)
        logits = scores(k, 0)
        if sinks is not None:
            nothing = jnp.broadcast_to(sinks.astype(jnp.float32)[None, ..., None], (*q.shape[:3], 1))
            logits = jnp.concatenate([logits, nothing], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1)[..., :chunk_size].astype(q.dtype)
        return jnp.einsum("skqt,skth->skqh", weights, as_numbers(v).astype(q.dtype)).astype(q.dtype)

    def add_chunk(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        running_max, sum_exp, out = state
        k, v = read(index)
        logits = scores(k, index * chunk_size)
        new_max = jnp.maximum(running_max, logits.max(axis=-1))
        rescale, weights = jnp.exp(running_max - new_max), jnp.exp(logits - new_max[..., None])
        factors = weights.astype(q.dtype), as_numbers(v).astype(q.dtype)
        added = jnp.einsum("skqt,skth->skqh", *factors, preferred_element_type=jnp.float32)
        return new_max, sum_exp * rescale + weights.sum(axis=-1), out * rescale[..., None] + added

    # The running maximum starts finite, so that a chunk of which a query sees nothing adds exactly 0.
    lowest = jnp.full(q.shape[:3], jnp.finfo(jnp.float32).min)
    values = jax.eval_shape(read, 0)[1]
    empty = lowest, jnp.zeros_like(lowest), jnp.zeros((*q.shape[:3], values.shape[-1]), jnp.float32)
    if sinks is not None:
        highest = jnp.broadcast_to(sinks.astype(jnp.float32), q.shape[:3])
        empty = highest, jnp.ones_like(highest), empty[2]
    largest, sum_exp, out = jax.lax.fori_loop(0, jnp.max(position) // chunk_size + 1, add_chunk, empty)
    if partial:
        return Partial(out / jnp.where(sum_exp > 0, sum_exp, 1)[..., None], largest + jnp.log(sum_exp))
    return (out / sum_exp[..., None]).astype(q.dtype)
