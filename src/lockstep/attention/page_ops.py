"""Whole pages out of the pool and into it, one at a time.

The TPU compiler turns a scatter of whole pages into one over another order of the axes, and copies the pool into it and
back at every layer; a gather of pages with few heads, too. One page at a time is read and written in place.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Int, Shaped

type TakePages = Callable[[Array, Array], Array]
"""Takes a pool and indices ``[...]`` of its pages; gives ``[..., page_size, two_kv_heads, stored_head]``."""


def gather_pages(
    pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"], page: Int[Array, "*index"]
) -> Shaped[Array, "*index page_size two_kv_heads stored_head"]:
    """All pages in one gather."""
    return pool[page]


def take_pages(
    pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"], page: Int[Array, "*index"]
) -> Shaped[Array, "*index page_size two_kv_heads stored_head"]:
    """A page at a time."""
    taken = jax.lax.map(lambda one: jax.lax.dynamic_index_in_dim(pool, one, keepdims=False), page.reshape(-1))
    return taken.reshape(*page.shape, *pool.shape[1:])


def put_pages(
    pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"],
    page: Int[Array, " row"],
    kv: Shaped[Array, "row page_size two_kv_heads stored_head"],
) -> Shaped[Array, "pool_page page_size two_kv_heads stored_head"]:
    """The pool with row ``i`` of ``kv`` on page ``page[i]``; of a page that several rows name, the last."""
    packed = kv.astype(pool.dtype)

    def put(row: Array, pool: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(pool, packed[row], page[row], 0)

    return jax.lax.fori_loop(0, page.shape[0], put, pool)


def copy_pages(
    pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"],
    source: Int[Array, " row"],
    target: Int[Array, " row"],
) -> Shaped[Array, "pool_page page_size two_kv_heads stored_head"]:
    """The pool with page ``source[i]`` on page ``target[i]``; no target is the source of another row."""

    def copy(row: Array, pool: Array) -> Array:
        moved = jax.lax.dynamic_index_in_dim(pool, source[row], 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(pool, moved, target[row], 0)

    return jax.lax.fori_loop(0, source.shape[0], copy, pool)
