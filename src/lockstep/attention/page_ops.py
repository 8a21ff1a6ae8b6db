"""Reading, writing and copying whole pages of the pool, all at once or one at a time.

The TPU compiler turns a scatter of whole pages into one over another order of the axes, and copies the pool into that
order and back at every layer; likewise a gather of pages with few heads. One page at a time is read and written in
place.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int, Num

from lockstep.attention.kv_dtype import to_pool

type ReadPages = Callable[[Array, Array], Array]
"""Takes a pool and indices ``[...]`` of its pages; returns ``[..., page_size, two_kv_heads, head]``."""


def gather_pages(
    pool: Num[Array, "pool_page page_size two_kv_heads head"], page: Int[Array, "*index"]
) -> Num[Array, "*index page_size two_kv_heads head"]:
    """Reads all pages in one gather."""
    return pool[page]


def read_pages_one_by_one(
    pool: Num[Array, "pool_page page_size two_kv_heads head"], page: Int[Array, "*index"]
) -> Num[Array, "*index page_size two_kv_heads head"]:
    """Reads one page at a time."""
    pages = jax.lax.map(lambda one: jax.lax.dynamic_index_in_dim(pool, one, keepdims=False), page.reshape(-1))
    return pages.reshape(*page.shape, *pool.shape[1:])


def write_pages_one_by_one(
    pool: Num[Array, "pool_page page_size two_kv_heads head"],
    page: Int[Array, " row"],
    kv: Float[Array, "row page_size two_kv_heads head"],
) -> Num[Array, "pool_page page_size two_kv_heads head"]:
    """Writes row ``i`` of ``kv`` to page ``page[i]``, in order: of several rows that name a page the last one wins."""
    stored = to_pool(kv, pool.dtype)

    def write(row: Array, pool: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(pool, stored[row], page[row], 0)

    return jax.lax.fori_loop(0, page.shape[0], write, pool)


def copy_pages_one_by_one(
    pool: Num[Array, "pool_page page_size two_kv_heads head"],
    source: Int[Array, " row"],
    target: Int[Array, " row"],
) -> Num[Array, "pool_page page_size two_kv_heads head"]:
    """Copies page ``source[i]`` to page ``target[i]``; no row's target may be another row's source."""

    def copy(row: Array, pool: Array) -> Array:
        page = jax.lax.dynamic_index_in_dim(pool, source[row], 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(pool, page, target[row], 0)

    return jax.lax.fori_loop(0, source.shape[0], copy, pool)
