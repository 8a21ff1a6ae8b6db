"""Paged attention in plain JAX: the reference for every kernel, and what prefill runs where there is no kernel.

Paged attention: Kwon et al. 2023, https://arxiv.org/abs/2309.06180, section 4.1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from lockstep.models.attention.contiguous_kv import by_query
from lockstep.models.attention.page_ops import ReadKv, gather_kv
from lockstep.models.attention.softmax import ScoreModifier, attend

CHUNK = 64
"""Positions attended at a time: fewer than in decode, because each row of queries gathers a chunk of its own."""


def paged_attention(
    q: Float[Array, "sequence query kv_head group head"],
    pool: Num[Array, "pool_page page_size row size"],
    page_table: Int[Array, "sequence page"],
    start: Int[Array, " sequence"],
    modifier: ScoreModifier = ScoreModifier(),  # noqa: B008  (frozen)
    read_kv: ReadKv = gather_kv,
    sinks: Float[Array, "kv_head group"] | None = None,
    *,
    partial: bool = False,
) -> Any:
    """Attend each query to all positions of its own sequence up to and including its own.

    Args:
        q: The queries; query ``i`` of a sequence is at position ``start + i``.
        pool: K and V interleaved on the head axis (K of kv head ``h`` at ``2 * h``, V at ``2 * h + 1``). Beyond a
            sequence's last query it may hold anything, infinities included.
        page_table: The pool pages of each sequence, in order; position ``p`` is on page ``p // page_size``.
        start: The position of each sequence's first query.
        sinks: The score of each head for nothing (`attend`); None for none.
    """
    sequences, queries, kv_heads, group, head = q.shape
    num_pages, (page_size, _, _) = page_table.shape[1], pool.shape[1:]
    pages = min(max(CHUNK // page_size, 1), num_pages)
    num_chunks = -(-num_pages // pages)
    padded = jnp.pad(page_table, ((0, 0), (0, num_chunks * pages - num_pages)))

    def read(index: Array | int) -> tuple[Array, Array]:
        k, v = read_kv(pool, jax.lax.dynamic_slice_in_dim(padded, index * pages, pages, axis=1))
        # What is masked has weight 0, and 0 times infinity is NaN.
        position = index * pages * page_size + jnp.arange(pages * page_size)
        written = position < (start + queries)[:, None]
        return k, jnp.where(written[:, None, :, None], v, 0)

    rows = q.transpose(0, 2, 1, 3, 4).reshape(sequences, kv_heads, queries * group, head)
    position = jnp.repeat(start[:, None] + jnp.arange(queries), group, axis=1)
    sinks = None if sinks is None else jnp.tile(sinks, (1, queries))
    size = pages * page_size
    return by_query(attend(rows, position, read, num_chunks, size, modifier, sinks, partial=partial), queries)
