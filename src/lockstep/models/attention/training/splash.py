"""Attention by jax's TPU kernel, whose scores never leave vector memory."""

import math
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    LocalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SplashAttentionKernel
from jaxtyping import Array, Float, Int

from lockstep.models.attention.training.causal import CausalAttention, HeadArrays
from lockstep.models.attention.training.context import SplitPositions

LANES: Final = 128
"""The number of positions that a block of the kernel is a multiple of."""

LARGEST_BLOCK: Final = 512
"""The largest number of queries, and of keys, in a block."""


def block_size(length: int) -> int:
    """The number of queries, and of keys, in a block.

    Args:
        length: The number of positions of a row, which is padded to a multiple of `LANES`.
    """
    return math.gcd(length + -length % LANES, LARGEST_BLOCK)


def splash_kernel(
    length: int, heads: int, attention: CausalAttention, *, split: SplitPositions | None = None, interpret: bool = False
) -> SplashAttentionKernel:
    """Return the kernel for rows of one length.

    Args:
        length: The number of positions of a row, a multiple of `LANES`.
        split: The split of a row; the kernel is then sharded over its axis.
        interpret: Whether to run without a TPU, slowly, for tests.
    """
    shape, window = (length, length), attention.sliding_window
    mask = CausalMask(shape) if window is None else LocalMask(shape, (window - 1, 0), 0)
    size = block_size(length)
    if split is not None:
        mask.q_sequence = split.order.astype(np.int32)
        size = block_size(length // (2 * split.devices))
    return make_splash_mha(
        MultiHeadMask([mask] * heads),
        block_sizes=BlockSizes(
            block_q=size, block_kv=size, block_kv_compute=size, block_q_dkv=size, block_kv_dkv=size,
            block_kv_dkv_compute=size, block_q_dq=size, block_kv_dq=size,
        ),
        head_shards=1,
        q_seq_shards=1 if split is None else split.devices,
        attn_logits_soft_cap=attention.soft_cap,
        interpret=interpret,
    )  # fmt: skip


def splash_attention(
    arrays: HeadArrays,
    attention: CausalAttention,
    *,
    query_segments: Int[Array, "batch query"] | None = None,
    kernel: SplashAttentionKernel | None = None,
    interpret: bool = False,
) -> Float[Array, "batch query kv_head group value"]:
    """Attend on one TPU; blocks that causality or the window leave empty are not computed, forward or backward.

    Rows whose length is not a multiple of `LANES` are padded at their end, where no query of theirs looks.

    Args:
        arrays: The arrays, whose key/value heads are not repeated.
        query_segments: The document of each query, with ``kernel``.
        kernel: This device's part of the kernel of a split row; None: the queries are those of all positions.
        interpret: Whether to run without a TPU, slowly, for tests.
    """
    q, k, v, segment_ids, sinks = arrays
    batch, length, kv_heads, group, head = q.shape
    padding = -length % LANES if kernel is None else 0
    # The kernel has no scale.
    q = (q.astype(jnp.float32) * attention.scale).astype(q.dtype)
    q, k, v = (jnp.moveaxis(jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2))), 1, -2) for x in (q, k, v))
    segments = None
    if segment_ids is not None:
        padded = jnp.pad(segment_ids, ((0, 0), (0, padding)))
        segments = SegmentIds(padded if query_segments is None else query_segments, padded)
    if kernel is None:
        kernel = splash_kernel(length + padding, kv_heads * group, attention, interpret=interpret)
    heads = q.reshape(batch, kv_heads * group, length + padding, head)
    flat = None if sinks is None else sinks.reshape(-1)
    out = jnp.asarray(jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(heads, k, v, segments, flat))
    out = jnp.moveaxis(out.reshape(batch, kv_heads, group, length + padding, v.shape[-1]), -2, 1)
    return out[:, :length]
