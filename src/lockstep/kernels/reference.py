"""Paged attention in plain JAX: what every kernel must agree with, and what runs on CPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def paged_attention(
    q: Float[Array, "sequence query kv_head group head"],
    pool: Float[Array, "pool_page page_size two_kv_heads head"],
    page_table: Int[Array, "sequence page"],
    start: Int[Array, " sequence"],
) -> Float[Array, "sequence query kv_head group head"]:
    """Attends each query to all positions of its own sequence up to and including its own.

    Args:
        q: queries; query ``i`` of a sequence stands at position ``start + i``.
        pool: K and V interleaved on the head axis (K of kv head ``h`` at ``2 * h``, V at ``2 * h + 1``).
            What lies beyond a query has weight 0, so it must be finite: 0 times NaN is NaN.
        page_table: pool pages of each sequence, in order; position ``p`` lies on page ``p // page_size``.
        start: position of each sequence's first query.

    Returns:
        Attention output in the dtype of ``q``; softmax in float32.
    """
    num_sequences, num_pages = page_table.shape
    page_size, head = pool.shape[1], pool.shape[3]
    context = pool[page_table].reshape(num_sequences, num_pages * page_size, -1, 2, head)
    k, v = context[..., 0, :], context[..., 1, :]
    scores = jnp.einsum("sqkgh,stkh->skgqt", q, k, preferred_element_type=jnp.float32) * head**-0.5
    query_position = start[:, None] + jnp.arange(q.shape[1])
    visible = jnp.arange(num_pages * page_size) <= query_position[..., None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("skgqt,stkh->sqkgh", weights, v).astype(q.dtype)
