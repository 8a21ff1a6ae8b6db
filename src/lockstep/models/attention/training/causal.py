"""Causal self-attention in plain JAX: its scores, and their computation all at once or for some queries at a time."""

import dataclasses
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERY_BLOCK: Final = 512
"""The number of queries whose scores are in memory at once."""


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
        """Return where a query may look at a key.

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


class HeadArrays(NamedTuple):
    """The arrays that attention over whole rows reads."""

    q: Float[Array, "batch query kv_head group head"]
    """The queries; ``group`` of them share a key/value head."""
    k: Float[Array, "batch position kv_head head"]
    v: Float[Array, "batch position kv_head value"]
    segment_ids: Int[Array, "batch position"] | None = None
    """The document of each position; a query looks at no other document. None: a row is one document."""
    sinks: Float[Array, "kv_head group"] | None = None
    """The score of each query head for nothing, which takes a part of its softmax; None for none."""


class Queries(NamedTuple):
    """The queries that a device has of a row."""

    positions: Int[Array, " query"]
    segment_ids: Int[Array, "batch query"] | None
    """The document of each; None: a row is one document."""


def attend_masked(
    q: Float[Array, "batch query kv_head group head"],
    k: Float[Array, "batch key kv_head head"],
    v: Float[Array, "batch key kv_head value"],
    mask: Bool[Array, "any query key"],
    attention: CausalAttention,
    sinks: Float[Array, "kv_head group"] | None = None,
) -> Float[Array, "batch query kv_head group value"]:
    """Attend with all scores in memory at once, in float32 (Vaswani et al. 2017, arXiv 1706.03762, equation 1).

    Args:
        q: The queries; ``group`` of them share a key/value head.
        mask: True where a query may look at a key; every query may look at one at least.
        sinks: See `HeadArrays`.
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
    arrays: HeadArrays, attention: CausalAttention, queries: Queries | None = None
) -> Float[Array, "batch query kv_head group value"]:
    """Attend with the scores of all pairs of positions in memory, kept for the backward pass.

    Args:
        queries: The queries, where they are not those of all positions.
    """
    q, k, v, segment_ids, sinks = arrays
    keys = jnp.arange(k.shape[1])
    queries = queries or Queries(keys, segment_ids)
    mask = attention.mask(queries.positions, keys, queries.segment_ids, segment_ids)
    return attend_masked(q, k, v, mask, attention, sinks)


def blockwise_attention(
    arrays: HeadArrays, attention: CausalAttention, queries: Queries | None = None, *, query_block: int = QUERY_BLOCK
) -> Float[Array, "batch query kv_head group value"]:
    """Attend with the scores of some queries in memory, in the backward pass too, which computes them again.

    This is section 2 of Rabe & Staats 2021 (arXiv 2112.05682) with blocks of queries alone. A sequence that is one
    block is computed as by `dense_attention`.

    Args:
        query_block: The number of queries at a time; the others are as in `dense_attention`.
    """
    q, k, v, segment_ids, sinks = arrays
    batch, length, kv_heads, group, head = q.shape
    if length <= query_block:
        return dense_attention(arrays, attention, queries)
    blocks = -(-length // query_block)
    keys = jnp.arange(k.shape[1])
    queries = queries or Queries(keys, segment_ids)
    # The last block begins early enough to be whole; what it computes twice is dropped.
    starts = jnp.minimum(jnp.arange(blocks) * query_block, length - query_block)
    # The gradients of k and v are sums over blocks, in the dtype that the blocks are given: that sum is in float32.
    wide_k, wide_v = k.astype(jnp.float32), v.astype(jnp.float32)

    @jax.checkpoint  # the backward pass computes a block's scores again
    def attend_block(start: Int[Array, ""]) -> Float[Array, "batch some kv_head group value"]:
        positions = jax.lax.dynamic_slice_in_dim(queries.positions, start, query_block)
        segments = queries.segment_ids
        segments = None if segments is None else jax.lax.dynamic_slice_in_dim(segments, start, query_block, 1)
        mask = attention.mask(positions, keys, segments, segment_ids)
        chosen = jax.lax.dynamic_slice_in_dim(q, start, query_block, 1)
        return attend_masked(chosen, wide_k.astype(k.dtype), wide_v.astype(v.dtype), mask, attention, sinks)

    parts = jax.lax.map(attend_block, starts)
    whole = jnp.moveaxis(parts[:-1], 0, 1).reshape(batch, -1, kv_heads, group, v.shape[-1])
    return jnp.concatenate([whole, parts[-1][:, (blocks - 1) * query_block - length :]], axis=1)
