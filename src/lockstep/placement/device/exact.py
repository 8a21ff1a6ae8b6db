"""Sums and products whose bits depend on their own numbers alone, not on what is computed beside them.

XLA chooses the order of a sum by the shape of the whole operation: on CPU a row of a product or of a reduction has
other bits beside other rows (``benchmarks/exact.py``). Here products have one shape, a tile of rows; sums are plain
additions in a fixed order; and barriers keep XLA from joining what rounds between them (FMA) in one program and not in
another. Whatever a replica's devices split is in `BLOCKS` blocks, each summed by itself, so that a device has a
subtree of the same tree.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from platform import machine
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCKS: Final = 8
"""The blocks of an axis that the devices of a replica split, at most; so the largest ``tensor`` of a layout."""
TILE: Final = 16
"""Rows that are multiplied together, where the bits of a row depend on their number."""
MOST_ROWS: Final = 128
"""Rows that are multiplied together at most."""
TERMS: Final = 16
"""The terms of a sum are a multiple of this."""
_WIDTH: Final = 128
_PANEL: Final = 24


def _has_avx512() -> bool:
    """Whether this machine has the parts of AVX-512 that YNNPACK asks for; without them nothing was compared."""
    file = Path("/proc/cpuinfo")
    with file.open(encoding="utf-8") if file.is_file() else contextlib.nullcontext(()) as lines:
        flags = next((line for line in lines if line.startswith("flags")), "")
    return {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags.split())


_ADDS_IN_TURN: Final = machine().lower() in {"x86_64", "amd64"}
"""Whether CPUs have the kernels that `_in_turn` rests on; those of ARM were not compared."""
_WIDE: Final = _ADDS_IN_TURN and _has_avx512()
"""Whether those of YNNPACK add in turn too."""
IN_TURN: Final = 128
"""Terms of a sum that a product of float32 on CPU adds one after the other, at most."""
_FEW: Final = 48
"""Rows that Eigen multiplies at most, where YNNPACK multiplies others."""
_MANY: Final = (64, 512)
"""Rows that YNNPACK multiplies together: at least, at most."""
COLUMNS: Final = 64
"""Columns that YNNPACK multiplies are a multiple of this."""

barrier: Final[Any] = jax.lax.optimization_barrier
"""The identity of arrays, across which XLA moves nothing."""


def blocks_of(size: int) -> int:
    """The number of blocks of an axis of a size: the largest power of two that divides it, at most `BLOCKS`."""
    return math.gcd(size, BLOCKS)


def elementwise(function: Callable[[Array], Array], x: Array) -> Array:
    """Return ``function(x)``, computed in rows of 128 numbers.

    The bits of exp, log, tanh and erf in XLA's code for CPU depend on the size of the array: alone, by three, or by a
    whole vector they are those of other polynomials, which differ in up to a fifth of all numbers.
    """
    rows = jnp.pad(x.reshape(-1), (0, -x.size % _WIDTH)).reshape(-1, _WIDTH)
    values = jnp.asarray(barrier(function(barrier(rows))))
    return values.reshape(-1)[: x.size].reshape(x.shape)


def tree_sum(x: Float[Array, "... width"]) -> Float[Array, "..."]:
    """Return the sums over the last axis, whose numbers are added in an order that depends on its size alone."""
    x = barrier(x)
    width = x.shape[-1]
    x = jnp.pad(x, [*((0, 0),) * (x.ndim - 1), (0, (1 << max(width - 1, 0).bit_length()) - width)])
    while x.shape[-1] > 1:
        parts = jnp.split(x, min(8, x.shape[-1]), axis=-1)
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        x = barrier(parts[0])
    return x[..., 0]


def add_blocks(parts: Float[Array, "block ..."]) -> Float[Array, "..."]:
    """Return the sum of blocks, neighbours first: what devices add of theirs, a power of two of them, is a subtree."""
    parts = barrier(parts)
    while len(parts) > 1:
        if len(parts) % 2:
            parts = jnp.concatenate([parts, jnp.zeros_like(parts[:1])])
        parts = parts[::2] + parts[1::2]
    return barrier(parts[0])


def add_heads(sums: Float[Array, "..."], axes: int, devices: Sequence[str]) -> Float[Array, "..."]:
    """Return the sum over the last axes, of heads, and over those of other devices; the axes are kept, and one more.

    Heads that devices repeat, a power of two of times, are added to each other first: the mean stays what it was.
    """
    kept = sums.shape[: sums.ndim - axes]
    heads = jnp.moveaxis(sums.reshape(*kept, -1), -1, 0)
    heads = jax.lax.all_gather(heads, devices, tiled=True) if devices else heads
    return add_blocks(heads).reshape(*kept, *(1,) * (axes + 1))


def tile_of(rows: int, dtype: Any, platform: str) -> int:
    """The number of rows that are multiplied together, where there are so many.

    In 16 bits on CPU a row has the same bits in tiles of any multiple of `TILE`, so that they are of what there is; but
    not in smaller ones on every machine (those with AMX). In float32 they are those of `_in_turn`. Elsewhere they are
    of `TILE`.
    """
    narrow = jnp.dtype(dtype).itemsize == 2
    if platform != "cpu" or not (narrow or _ADDS_IN_TURN):
        return TILE
    if narrow:
        return _even(rows, TILE, MOST_ROWS)
    if _WIDE and rows > _FEW:
        return max(_MANY[0], _even(rows, TILE, _MANY[1]))
    return _even(rows, _PANEL, 4 * _PANEL)


def _even(rows: int, multiple: int, most: int) -> int:
    tile = -(-rows // -(-rows // most))
    return -(-tile // multiple) * multiple if tile > TILE else TILE


def by_platform(cpu: Callable[[], Array], default: Callable[[], Array]) -> Array:
    """Return the result of one of two functions: that of the platform that the program is compiled for."""
    result: Array = jax.lax.platform_dependent(cpu=cpu, default=default)
    return result


def by_tile(compute: Callable[[int], Array], rows: int, dtype: Any, terms: int | None = None) -> Array:
    """Return ``compute(tile)``, on CPU for a tile of up to `MOST_ROWS` rows, elsewhere for `TILE`.

    Args:
        terms: In float32, the terms or columns of the products, whichever are more; None for any number. Up to
            `IN_TURN` of both are few enough for YNNPACK and Eigen to add in turn, whatever the rows.
    """
    larger = jnp.dtype(dtype).itemsize == 2 or (_WIDE and terms is not None and terms <= IN_TURN)
    tile = _even(rows, TILE, MOST_ROWS) if larger else TILE
    return compute(TILE) if tile == TILE else by_platform(lambda: compute(tile), lambda: compute(TILE))


def product(
    x: Float[Array, "*rows inputs"],
    weight: Float[Array, "inputs columns"],
    *,
    columns: int = 1,
    inner: int = 1,
    transposed: bool = False,
) -> Float[Array, "*rows columns"]:
    """Return ``x @ weight`` in float32, tile by tile of rows.

    Args:
        x: The input.
        weight: The weight; ``[columns, inputs]`` where it is ``transposed``.
        columns: The blocks that the columns are computed in. In 16 bits they are one: XLA's bits do not depend on
            them there.
        inner: The blocks that the sum is in, which `add_blocks` adds.
    """
    rows = x.reshape(-1, x.shape[-1])
    columns = columns if weight.dtype == jnp.float32 else 1
    axes = (((1,), (1,)), ((), ())) if transposed else (((1,), (0,)), ((), ()))

    def whole(rows: Array, weight: Array) -> Array:
        # XLA for CPU multiplies 16 bits as float32, in another order, where they are a batch or an odd number; where a
        # sum has few terms, in an order that depends on the rows; and few columns (jax 0.11: one, 0.12: up to 11) in
        # another than many.
        more, count = (0, -rows.shape[1] % TERMS), weight.shape[0 if transposed else 1]
        second = (0, max(0, TILE - count))
        rows, weight = jnp.pad(rows, ((0, 0), more)), jnp.pad(weight, (second, more) if transposed else (more, second))
        rows, weight = barrier((rows, weight))
        total = jax.lax.dot_general(
            rows, weight, axes, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return total[:, :count]

    def multiply(rows: Array) -> Array:
        if inner > 1:
            pairs = zip(jnp.split(rows, inner, axis=1), jnp.split(weight, inner), strict=True)
            return add_blocks(jnp.stack([whole(*pair) for pair in pairs]))
        parts = jnp.split(weight, columns, axis=0 if transposed else 1)
        return barrier(jnp.concatenate([whole(rows, part) for part in parts], axis=1))

    def by(tile: int) -> Array:
        return _map_tiles(multiply, rows, tile)

    if weight.dtype == jnp.float32 and _ADDS_IN_TURN and not transposed:
        total = by_platform(lambda: _in_turn(rows, weight, inner), lambda: by(TILE))
    else:
        total = by_tile(by, len(rows), x.dtype)
    return total.reshape(*x.shape[:-1], -1)


def _map_tiles(multiply: Callable[[Array], Array], rows: Array, tile: int) -> Array:
    padded = jnp.pad(rows, ((0, -len(rows) % tile), (0, 0))).reshape(-1, tile, rows.shape[1])
    result = multiply(padded[0]) if len(padded) == 1 else jax.lax.map(multiply, padded)
    return result.reshape(-1, result.shape[-1])[: len(rows)]


def _in_turn(rows: Float[Array, "row inputs"], weight: Float[Array, "inputs columns"], inner: int) -> Array:
    """`product` in float32 on CPU: each part of a sum is of up to `IN_TURN` terms, added one after the other by FMA.

    XLA computes a product whose first operand is transposed with Eigen and oneDNN's kernels. They split no sum of up to
    128 terms over threads or blocks where there are 16 rows and columns or more, and add in turn but in rests: of one
    column or, without AVX-512, of two rows. So columns are a multiple of 16, rows 16 or a multiple of 24.

    Its other product is YNNPACK's, about twice as fast. It adds in turn with AVX-512 where columns are a multiple of 64
    (else it takes kernels that add every second or fourth term together) and it packs the weight, as it does for more
    than 50 rows; for fewer it splits sums by the number of columns that a thread has.
    """
    columns, width = weight.shape[1], weight.shape[0] // inner
    is_wide = _WIDE and len(rows) > _FEW
    least = -(-width // IN_TURN)
    parts = next((number for number in range(least, 2 * least) if width % number == 0), least)
    rest = (0, -width % parts)
    more = (0, -columns % (COLUMNS if is_wide else TILE))
    weight = jnp.pad(weight.reshape(inner, width, columns), ((0, 0), rest, more))
    weight = barrier(weight.reshape(inner * parts, -1, weight.shape[2]))

    def multiply(rows: Array) -> Array:
        split = jnp.pad(rows.reshape(-1, inner, width), ((0, 0), (0, 0), rest)).reshape(-1, *weight.shape[:2])
        split = barrier(split.transpose((1, 0, 2) if is_wide else (1, 2, 0)))
        axes = (((2 if is_wide else 1,), (1,)), ((0,), (0,)))
        sums = barrier(jax.lax.dot_general(split, weight, axes, precision=jax.lax.Precision.HIGHEST))
        by_block = sums.reshape(inner, parts, *sums.shape[1:])
        return add_blocks(functools.reduce(operator.add, [by_block[:, part] for part in range(parts)]))

    return _map_tiles(multiply, rows, tile_of(len(rows), weight.dtype, "cpu"))[:, :columns]


def low_rank_product(a: Float[Array, "row rank"], b: Float[Array, "rank column"]) -> Float[Array, "row column"]:
    """Return ``a @ b`` in float32: a number has the same bits, whichever rows and columns are made beside it.

    On CPU it is a `product`; elsewhere, where columns may change bits, the numbers of the rank are added in order.
    Many of them are computed one after the other.
    """

    def in_order(a: Array, b: Array) -> Array:
        # A product of two numbers of 16 bits is not rounded, so that it may be joined with the sum (FMA).
        fix: Callable[[Array], Array] = barrier if a.dtype == jnp.float32 else lambda x: x

        def add(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
            return total + fix(pair[0][:, None] * pair[1]), None

        zeros = jnp.zeros((len(a), b.shape[1]), jnp.float32)
        return jax.lax.scan(add, zeros, (a.T.astype(jnp.float32), b.astype(jnp.float32)), unroll=min(8, len(b)))[0]

    def compute(a: Array, b: Array) -> Array:
        return by_platform(lambda: product(a, b), lambda: in_order(a, b))

    if a.dtype == jnp.float32 and not _ADDS_IN_TURN:
        return in_order(a, b)
    mesh: Any = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.are_all_axes_auto:  # XLA would split the product over the devices
        compute = jax.shard_map(compute, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    result: Array = jax.custom_batching.sequential_vmap(compute)(a, b)
    return result
