"""Queries, keys, values and documents of packed rows, their scores, and results with gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.models.attention import CausalAttention, HeadArrays

CASES = {
    "plain": (CausalAttention(scale=0.3), False),
    "window": (CausalAttention(scale=0.3, sliding_window=5), False),
    "soft cap": (CausalAttention(scale=0.7, soft_cap=1.5), False),
    "documents": (CausalAttention(scale=0.3), True),
    "all": (CausalAttention(scale=0.7, sliding_window=5, soft_cap=1.5), True),
}
"""Scores, and whether rows are packed."""

SINKS = np.array([[0.5, -2.0, 3.0], [1.0, 0.0, -1.0]], np.float32)
"""The score for nothing of 3 query heads of each of 2 key/value heads."""


def arrays(length, *, batch=2, kv_heads=2, group=3, head=4, packed=False):
    """q, k, v in float32, and segment ids whose documents end at no multiple of a block, with padding at the end."""
    draw = np.random.default_rng(0)
    q = draw.standard_normal((batch, length, kv_heads, group, head)).astype(np.float32)
    k, v = (draw.standard_normal((batch, length, kv_heads, head)).astype(np.float32) for _ in range(2))
    if not packed:
        return q, k, v, None
    ends = np.array([[length // 3, length // 2 + 1, length - 3], [1, length - 9, length - 2]])
    segments = 1 + (np.arange(length) >= ends[:, :, None]).sum(axis=1)
    return q, k, v, jnp.asarray(np.where(segments == 4, 0, segments), jnp.int32)


def with_gradients(function, inputs, attention, **options):
    """The result, and the gradients of a sum of it in which every element counts differently."""
    weights = np.random.default_rng(1).standard_normal(inputs[0].shape).astype(np.float32)

    def total(q, k, v, *sinks):
        out = function(HeadArrays(q, k, v, inputs[3], *sinks), attention, **options)
        return jnp.sum(out * weights), out

    arrays = (*inputs[:3], *inputs[4:])
    gradients, out = jax.jit(jax.grad(total, argnums=range(len(arrays)), has_aux=True))(*arrays)
    return (out, *gradients)
