"""Paged attention in plain JAX: what every kernel must agree with, and what prefill runs without one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from lockstep.attention.page_ops import TakePages, gather_pages
from lockstep.attention.softmax import Scores, attend

CHUNK = 64
"""Positions attended at a time. A row of queries gathers its own, so fewer than in decode are kept at once."""


def paged_attention(
    q: Float[Array, "sequence query kv_head group head"],
    pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"],
    page_table: Int[Array, "sequence page"],
    start: Int[Array, " sequence"],
    rules: Scores = Scores(),  # noqa: B008  (frozen)
    take: TakePages = gather_pages,
) -> Float[Array, "sequence query kv_head group head"]:
    """Attends each query to all positions of its own sequence up to and including its own.

    Args:
        q: queries; query ``i`` of a sequence stands at position ``start + i``.
        pool: K and V interleaved on the head axis (K of kv head ``h`` at ``2 * h``, V at ``2 * h + 1``), as they are
            or as `quantise` makes them. Beyond a sequence's last query it may hold anything, infinities too.
        page_table: pool pages of each sequence, in order; position ``p`` lies on page ``p // page_size``.
        start: position of each sequence's first query.
        rules: soft cap and window.
        take: reads pages.

    Returns:
        Attention output in the dtype of ``q``; softmax in float32.
    """
    sequences, queries, kv_heads, group, head = q.shape
    num_pages, (page_size, _, stored_head) = page_table.shape[1], pool.shape[1:]
    pages = min(max(CHUNK // page_size, 1), num_pages)
    num_chunks = -(-num_pages // pages)
    padded = jnp.pad(page_table, ((0, 0), (0, num_chunks * pages - num_pages)))

    def read(index: Array | int) -> tuple[Array, Array]:
        chunk = take(pool, jax.lax.dynamic_slice_in_dim(padded, index * pages, pages, axis=1))
        heads = chunk.reshape(sequences, pages * page_size, kv_heads, 2, stored_head).transpose(3, 0, 2, 1, 4)
        # What is masked has weight 0, and 0 times infinity is NaN.
        place = index * pages * page_size + jnp.arange(pages * page_size)
        mine = place < (start + queries)[:, None]
        return heads[0], jnp.where(mine[:, None, :, None], heads[1], 0)

    rows = q.transpose(0, 2, 1, 3, 4).reshape(sequences, kv_heads, queries * group, head)
    position = jnp.repeat(start[:, None] + jnp.arange(queries), group, axis=1)
    out = attend(rows, position, read, num_chunks, pages * page_size, rules)
    return out.reshape(sequences, kv_heads, queries, group, head).transpose(0, 2, 1, 3, 4)
