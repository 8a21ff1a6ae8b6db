"""Reading, writing and copying whole pages of the pool, all at once or one at a time, and the dtype of its numbers.

The TPU compiler turns a scatter of whole pages into one over another order of the axes, and copies the pool into that
order and back at every layer; likewise a gather of pages with few heads. One page at a time is read and written in
place.

Eight bits are E4M3 of Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433, section 3): a sign, 4 bits of
exponent, 3 of mantissa, numbers up to 448, NaN and no infinity. There are no scales: a number between 2^-6 and 448 is
off by at most a sixteenth of itself, whatever its neighbours are, so that nothing has to be calibrated. Where XLA reads
and writes the pool, a pool in 8 bits is an array of bytes: on CPU it converts arrays of an 8-bit floating type to 16
bits and back, the whole pool at every step. Kernels take an array of that type as it is.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from lockstep.placement.device import BYTE, FP8, LARGEST_FP8

type ReadKv = Callable[[Array, Array], tuple[Array, ...]]
"""Takes a pool and the pages ``[sequence, page]`` of it that each sequence has; returns K and V, or a latent of both,
``[sequence, kv_head, position, head]``."""


def keys_and_values(parts: Sequence[Array], value_size: int | None) -> tuple[Array, Array]:
    """Return K and V of what a `ReadKv` returns.

    Args:
        value_size: See `lockstep.models.attention.kv.PagedKv`.
    """
    if value_size is None:
        k, v = parts
        return k, v
    (latent,) = parts
    return latent, latent[..., :value_size]


def gather_kv(
    pool: Num[Array, "pool_page page_size row head"],
    page: Int[Array, "sequence page"],
    parts: int = 2,
    shape: tuple[int, int] | None = None,
) -> tuple[Num[Array, "sequence kv_head position size"], ...]:
    """Read the heads of all positions in one gather for K and one for V, straight into the order of the result.

    A gather of whole pages would have to be put into that order by a second pass over the memory.

    Args:
        parts: The number of rows of a head: 2 for K and V, 1 for a latent.
        shape: The rows of a position and their size, where they are not the pool's (`as_rows`).
    """
    page_size, rows, head = pool.shape[1:]
    if shape is not None and shape != (rows, head):
        return _gather_pieces(pool, page, parts, shape)
    first = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(len(page), 1, -1) * rows
    k = first + parts * jnp.arange(rows // parts)[:, None]
    flat = pool.reshape(-1, head)
    return tuple(flat.at[k + part].get(mode="promise_in_bounds") for part in range(parts))


def _gather_pieces(
    pool: Num[Array, "pool_page page_size row head"],
    page: Int[Array, "sequence page"],
    parts: int,
    shape: tuple[int, int],
) -> tuple[Num[Array, "sequence kv_head position size"], ...]:
    """Read heads that are made of consecutive pieces of the pool's rows."""
    page_size, rows, head = pool.shape[1:]
    piece = math.gcd(head, shape[1])
    position = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(len(page), 1, -1, 1)
    place = jnp.arange(shape[1] // piece)
    row = parts * jnp.arange(shape[0] // parts)[:, None, None]
    first = position * (rows * head // piece)
    flat = pool.reshape(-1, piece)
    pieces = (flat.at[first + (row + part) * len(place) + place].get(mode="promise_in_bounds") for part in range(parts))
    return tuple(part.reshape(*part.shape[:3], shape[1]) for part in pieces)


def as_rows(numbers: Num[Array, "*batch row head"], shape: tuple[int, int]) -> Num[Array, "*batch rows size"]:
    """Return the numbers of positions in rows of another shape, one after the other: the first of more, or with zeros
    behind.
    """
    if numbers.shape[-2:] == shape:
        return numbers
    flat, count = numbers.reshape(*numbers.shape[:-2], -1), math.prod(shape)
    more = max(0, count - flat.shape[-1])
    flat = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, more)]) if more else flat[..., :count]
    return flat.reshape(*numbers.shape[:-2], *shape)


def read_kv_page_by_page(
    pool: Num[Array, "pool_page page_size row head"],
    page: Int[Array, "sequence page"],
    parts: int = 2,
    shape: tuple[int, int] | None = None,
) -> tuple[Num[Array, "sequence kv_head position size"], ...]:
    """Read one page at a time; the arguments are those of `gather_kv`."""
    rows, head = pool.shape[2:]
    # With an axis of one row, the TPU compiler reads the pool in another order than it is written in.
    stored = pool.reshape(len(pool), -1, head) if rows == 1 else pool
    pages = jax.lax.map(lambda number: jax.lax.dynamic_index_in_dim(stored, number, keepdims=False), page.reshape(-1))
    if shape is not None and shape != (rows, head):
        pages, (rows, head) = as_rows(pages, shape), shape
    heads = pages.reshape(len(page), -1, rows // parts, parts, head)
    return tuple(heads.transpose(3, 0, 2, 1, 4))


def write_pages_one_by_one(
    pool: Num[Array, "pool_page page_size two_kv_heads head"],
    page: Int[Array, " row"],
    kv: Float[Array, "row page_size two_kv_heads head"],
) -> Num[Array, "pool_page page_size two_kv_heads head"]:
    """Write row ``i`` of ``kv`` to page ``page[i]``, in order: of several rows that name a page the last one wins."""
    stored = to_pool(kv, pool.dtype)

    def write(row: Array, pool: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(pool, stored[row], page[row], 0)

    return jax.lax.fori_loop(0, page.shape[0], write, pool)


def copy_pages_one_by_one(
    pool: Num[Array, "pool_page page_size two_kv_heads head"],
    source: Int[Array, " row"],
    target: Int[Array, " row"],
) -> Num[Array, "pool_page page_size two_kv_heads head"]:
    """Copy page ``source[i]`` to page ``target[i]``; no row's target may be another row's source."""

    def copy(row: Array, pool: Array) -> Array:
        page = jax.lax.dynamic_index_in_dim(pool, source[row], 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(pool, page, target[row], 0)

    return jax.lax.fori_loop(0, source.shape[0], copy, pool)


def to_pool(kv: Float[Array, "*shape"], dtype: jnp.dtype) -> Num[Array, "*shape"]:
    """Round K or V to the numbers of a pool, once, when it is written; every reader sees the same rounded numbers.

    In 8 bits finite numbers beyond the largest become the largest; what is not finite becomes NaN, so that a sequence
    that overflowed is seen to have done so.
    """
    if dtype not in (FP8, BYTE):
        return kv.astype(dtype)
    rounded = jnp.where(jnp.isfinite(kv), jnp.clip(kv, -LARGEST_FP8, LARGEST_FP8), jnp.nan).astype(FP8)
    return jax.lax.bitcast_convert_type(rounded, dtype)
