"""Which scores a causal self-attention has, and the plain computation of all of them at once."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalAttention:
    """The scores of queries, and the keys that each may look at: those at its own position and before.

    Args:
        sliding_window: The number of positions that a query attends to, its own included; None for all.
        soft_cap: The cap c of a score s, which becomes ``c * tanh(s / c)``; None for none.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def mask(
        self,
        queries: Int[Array, " query"],
        keys: Int[Array, " key"],
        query_segments: Int[Array, "batch query"] | None,
        key_segments: Int[Array, "batch key"] | None,
    ) -> Bool[Array, "any query key"]:
        """Returns where a query may look at a key.

        Args:
            query_segments: The document of each query; None: a row is one document.
            key_segments: The document of each key; None where ``query_segments`` is.

        Returns:
            True where it may, for each row, or once for all rows.
        """
        distance = queries[:, None] - keys[None, :]
        allowed = distance >= 0
        if self.sliding_window is not None:
            allowed &= distance < self.sliding_window
        if query_segments is None or key_segments is None:
            return allowed[None]
        return allowed & (query_segments[:, :, None] == key_segments[:, None, :])


class Queries(NamedTuple):
    """The queries that a device has of a row."""

    positions: Int[Array, " query"]
    segment_ids: Int[Array, "batch query"] | None
    """The document of each; None: a row is one document."""


def attend_masked(
    q: Float[Array, "batch query kv_head group head"],
    k: Float[Array, "batch key kv_head head"],
    v: Float[Array, "batch key kv_head head"],
    mask: Bool[Array, "any query key"],
    attention: CausalAttention,
    sinks: Float[Array, "kv_head group"] | None = None,
) -> Float[Array, "batch query kv_head group head"]:
    """Attends with all scores in memory at once, in float32 (Vaswani et al. 2017, arXiv 1706.03762, equation 1).

    Args:
        q: The queries; ``group`` of them share a key/value head.
        mask: True where a query may look at a key; every query may look at one at least.
        sinks: The score of each query head for nothing, which takes a part of its softmax; None for none.
    """
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k, preferred_element_type=jnp.float32) * attention.scale
    if attention.soft_cap is not None:
        scores = attention.soft_cap * jnp.tanh(scores / attention.soft_cap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        nothing = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, nothing], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, v)


def dense_attention(
    q: Float[Array, "batch query kv_head group head"],
    k: Float[Array, "batch position kv_head head"],
    v: Float[Array, "batch position kv_head head"],
    segment_ids: Int[Array, "batch position"] | None,
    attention: CausalAttention,
    sinks: Float[Array, "kv_head group"] | None = None,
    queries: Queries | None = None,
) -> Float[Array, "batch query kv_head group head"]:
    """Attends with the scores of all pairs of positions in memory, kept for the backward pass.

    Args:
        q: The queries; ``group`` of them share a key/value head.
        segment_ids: The document of each position; None: a row is one document.
        sinks: The score of each query head for nothing, which takes a part of its softmax; None for none.
        queries: The queries, where they are not those of all positions.
    """
    keys = jnp.arange(k.shape[1])
    queries = queries or Queries(keys, segment_ids)
    mask = attention.mask(queries.positions, keys, queries.segment_ids, segment_ids)
    return attend_masked(q, k, v, mask, attention, sinks)
