"""Attention for some queries at a time: memory grows with the length of a sequence, not with its square."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.models.attention.training.causal import CausalAttention, Queries, attend_masked, dense_attention

QUERY_BLOCK: Final = 512
"""The number of queries whose scores are in memory at once."""


def blockwise_attention(
    q: Float[Array, "batch query kv_head group head"],
    k: Float[Array, "batch position kv_head head"],
    v: Float[Array, "batch position kv_head head"],
    segment_ids: Int[Array, "batch position"] | None,
    attention: CausalAttention,
    sinks: Float[Array, "kv_head group"] | None = None,
    queries: Queries | None = None,
    *,
    query_block: int = QUERY_BLOCK,
) -> Float[Array, "batch query kv_head group head"]:
    """Attends with the scores of some queries in memory, in the backward pass too, which computes them again.

    This is section 2 of Rabe & Staats 2021 (arXiv 2112.05682) with blocks of queries alone. A sequence that is one
    block is computed as by `dense_attention`.

    Args:
        q: The queries; ``group`` of them share a key/value head.
        segment_ids: The document of each position; None: a row is one document.
        sinks: The score of each query head for nothing; None for none.
        queries: The queries, where they are not those of all positions.
        query_block: The number of queries at a time.
    """
    batch, length, kv_heads, group, head = q.shape
    if length <= query_block:
        return dense_attention(q, k, v, segment_ids, attention, sinks, queries)
    blocks = -(-length // query_block)
    keys = jnp.arange(k.shape[1])
    queries = queries or Queries(keys, segment_ids)
    # The last block begins early enough to be whole; what it computes twice is dropped.
    starts = jnp.minimum(jnp.arange(blocks) * query_block, length - query_block)
    # The gradients of k and v are sums over blocks, in the dtype that the blocks are given: that sum is in float32.
    wide_k, wide_v = k.astype(jnp.float32), v.astype(jnp.float32)

    @jax.checkpoint  # the backward pass computes a block's scores again
    def attend_block(start: Int[Array, ""]) -> Float[Array, "batch some kv_head group head"]:
        positions = jax.lax.dynamic_slice_in_dim(queries.positions, start, query_block)
        segments = queries.segment_ids
        segments = None if segments is None else jax.lax.dynamic_slice_in_dim(segments, start, query_block, 1)
        mask = attention.mask(positions, keys, segments, segment_ids)
        chosen = jax.lax.dynamic_slice_in_dim(q, start, query_block, 1)
        return attend_masked(chosen, wide_k.astype(k.dtype), wide_v.astype(v.dtype), mask, attention, sinks)

    parts = jax.lax.map(attend_block, starts)
    whole = jnp.moveaxis(parts[:-1], 0, 1).reshape(batch, -1, kv_heads, group, head)
    return jnp.concatenate([whole, parts[-1][:, (blocks - 1) * query_block - length :]], axis=1)
