"""Sums and products whose bits depend on their own numbers alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models import block
from lockstep.placement.device import (
    BLOCKS,
    TILE,
    add_blocks,
    add_heads,
    blocks_of,
    elementwise,
    exact,
    product,
    tile_of,
    tree_sum,
)
from lockstep.placement.device.exact import MOST_ROWS

pytestmark = pytest.mark.optimized
ON_AVX512 = pytest.mark.skipif(not exact._WIDE, reason="this machine has no AVX-512")
"""For kernels that products take with AVX-512 alone; without it the other form, tested too, is all that runs."""

RNG = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def xielu(x):
    numbers = (jnp.asarray(each, jnp.float32) for each in (0.8, -1.0, 0.5, -1e-6))
    return block.xielu(x, *numbers)


def test_an_axis_is_in_as_many_blocks_as_a_power_of_two_divides():
    assert [blocks_of(size) for size in (1, 6, 12, 40, 4096)] == [1, 2, 4, 8, 8]


@pytest.mark.parametrize("width", [1, 24, 100])
def test_a_sum_has_the_bits_of_its_own_numbers(width):
    x = normal(9, width)
    whole = np.asarray(jax.jit(tree_sum)(x))
    np.testing.assert_allclose(whole, np.sum(np.asarray(x, np.float64), axis=1), atol=1e-5)
    assert all(np.asarray(jax.jit(tree_sum)(x[row : row + 1])).item() == whole[row] for row in (0, 4, 8))


@pytest.mark.slow  # the fast tests have neither vectors nor the loops that users have
@pytest.mark.parametrize("function", [jnp.exp, jnp.log, jnp.tanh, block.ACTIVATIONS["gelu"], xielu])
def test_a_function_has_the_same_bits_in_an_array_of_any_size(function):
    x = normal(600) if function is xielu else jnp.abs(normal(600))
    compiled = jax.jit(lambda x: elementwise(function, x))
    whole = np.asarray(compiled(x))
    np.testing.assert_allclose(whole, function(np.asarray(x)), rtol=1e-5)
    for size in (3, 12):
        parts = [np.asarray(compiled(part)) for part in np.split(np.asarray(x), 600 // size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_what_a_device_adds_is_a_subtree():
    parts = normal(BLOCKS, 5)
    for devices in (2, 4, 8):
        own = jnp.stack([add_blocks(part) for part in jnp.split(parts, devices)])
        np.testing.assert_array_equal(add_blocks(own), add_blocks(parts))


@pytest.mark.parametrize(("heads", "axes"), [((6,), 1), ((5, 2), 2), ((7,), 0)])
def test_a_mean_over_heads_is_the_same_where_devices_repeat_them(heads, axes):
    sums = normal(3, *heads)
    whole = np.asarray(jax.jit(lambda x: add_heads(x, axes, ()))(sums))
    kept = whole.shape[: whole.ndim - axes - 1]
    assert whole.shape == (*kept, *(1,) * (axes + 1))
    added = np.asarray(sums, np.float64).reshape(*kept, -1).sum(-1)
    np.testing.assert_allclose(whole.reshape(kept), added, rtol=1e-5)  # a few additions in float32
    for times in (2, 8) if axes else ():
        more = add_heads(jnp.repeat(sums, times, axis=1), axes, ())
        np.testing.assert_array_equal(more / times, whole)


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 172), ("bfloat16", 43), ("float32", 172)])
def test_a_block_of_a_sum_has_the_same_bits_alone_and_beside_any_rows(dtype, width):
    inner = 4
    x, w = normal(100, inner * width, dtype=dtype), normal(inner * width, 64, dtype=dtype)
    whole = np.asarray(jax.jit(lambda x, w: product(x, w, inner=inner))(x, w))
    # Sums of 688 terms, some as large as 100, in float32.
    np.testing.assert_allclose(whole, np.asarray(x, np.float64) @ np.asarray(w, np.float64), atol=1e-3)
    alone = jax.jit(lambda x, w: product(x, w, inner=1))
    parts = [alone(*pair) for pair in zip(jnp.split(x, inner, axis=1), jnp.split(w, inner), strict=True)]
    np.testing.assert_array_equal(add_blocks(jnp.stack(parts)), whole)
    np.testing.assert_array_equal(jax.jit(lambda x, w: product(x, w, inner=inner))(x[:3], w), whole[:3])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_of_a_product_has_the_same_bits_beside_any_others_and_from_any_columns(dtype):
    x, w = normal(MOST_ROWS + 40, 64, dtype=dtype), normal(64, 96, dtype=dtype)
    whole = np.asarray(jax.jit(lambda x, w: product(x, w, columns=8))(x, w))
    np.testing.assert_allclose(whole, np.asarray(x, np.float64) @ np.asarray(w, np.float64), atol=1e-4)
    part = jax.jit(lambda x, w: product(x, w, columns=4))(x[7:8], w[:, 48:])
    np.testing.assert_array_equal(part[0], whole[7, 48:])
    for count in (1, 2, 7, 12):
        few = jax.jit(lambda x, w: product(x, w, columns=1))(x, w[:, 12 : 12 + count])
        np.testing.assert_array_equal(few, whole[:, 12 : 12 + count])
    for rows in (3, 20, 70):
        beside = jax.jit(lambda x, w: product(x, w, columns=8))(x[7 : 7 + rows], w)
        np.testing.assert_array_equal(beside, whole[7 : 7 + rows])
    tied = jax.jit(lambda x, w: product(x, w, columns=2, transposed=True))(x[20:30], w.T[:24])
    other = jax.jit(lambda x, w: product(x, w, columns=8, transposed=True))(x, w.T)
    np.testing.assert_array_equal(tied, other[20:30, :24])


def test_tiles_in_16_bits_on_cpu_are_of_what_there_is_but_of_16_rows_at_least():
    rows = (1, 2, 16, 17, MOST_ROWS, MOST_ROWS + 1, 1024)
    assert [tile_of(each, "bfloat16", "cpu") for each in rows] == [16, 16, 16, 32, 128, 80, 128]
    assert {tile_of(each, *other) for each in rows for other in (("bfloat16", "tpu"), ("float32", "tpu"))} == {TILE}


@pytest.mark.skipif(not exact._ADDS_IN_TURN, reason="its kernels are of x86")
def test_tiles_of_float32_are_of_what_there_is_from_49_rows_on_with_avx512(monkeypatch):
    rows = (1, 16, 17, 48, 49, MOST_ROWS + 1, 1024)
    monkeypatch.setattr(exact, "_WIDE", False)
    assert [tile_of(each, "float32", "cpu") for each in rows] == [16, 16, 24, 48, 72, 72, 96]
    monkeypatch.setattr(exact, "_WIDE", True)
    assert [tile_of(each, "float32", "cpu") for each in rows] == [16, 16, 24, 48, 64, 144, 512]


@ON_AVX512
@pytest.mark.parametrize("rows", [3, 48, 49, 512])
def test_terms_are_added_one_after_the_other_by_few_rows_and_by_many(rows):
    rng = np.random.default_rng(rows)  # of its own, for rounding to float64 first is another number once in 5e8
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((rows, 2 * 300), (2 * 300, 90)))
    found = jax.jit(lambda x, w: product(x, w, inner=2))(x, w)
    wide, blocks = [np.asarray(each, np.float64) for each in (x, w)], []
    for parts in np.split(np.arange(2 * 300).reshape(-1, 100), 2):
        sums = np.zeros((len(parts), rows, 90), np.float32)
        for part, terms in zip(sums, parts, strict=True):
            for term in terms:  # in float64 a product of two float32 is exact: rounded once, this is FMA
                part[:] = part + wide[0][:, term, None] * wide[1][term]
        blocks.append((sums[0] + sums[1]) + sums[2])
    np.testing.assert_array_equal(found, blocks[0] + blocks[1])


@pytest.mark.parametrize("wide", [pytest.param(True, marks=ON_AVX512), False])
@pytest.mark.parametrize(
    "cases", [2, pytest.param(12, marks=pytest.mark.slow), pytest.param(150, marks=pytest.mark.nightly)]
)
def test_a_product_of_float32_has_the_same_bits_in_any_rows_columns_and_program(cases, wide, monkeypatch):
    """A part of each product alone, in a loop beside other work, or from a part of the weight within the program."""
    rng = np.random.default_rng(cases)
    if not wide:
        monkeypatch.setattr(exact, "_WIDE", False)

    def looped(x: jax.Array, w: jax.Array, inner: int) -> jax.Array:
        nothing = jnp.zeros((len(x), w.shape[1]), jnp.float32)
        return jax.lax.fori_loop(
            0, 2, lambda _, sofar: product(x + 0 * jnp.tanh(sofar[:, :1]), w, inner=inner), nothing
        )

    for _ in range(cases):
        inner = int(rng.choice([1, 2, 8]))
        width = inner * int(rng.choice([rng.integers(1, 40), rng.integers(8, 300), 64 * rng.integers(1, 6), 131, 172]))
        rows, columns = (int(rng.choice([rng.integers(2, 20), rng.integers(2, size)])) for size in (400, 1500))
        x, w = (rng.standard_normal(shape, np.float32) for shape in ((rows, width), (width, columns)))
        whole = np.asarray(jax.jit(functools.partial(product, inner=inner))(x, w))
        np.testing.assert_allclose(whole, x.astype(np.float64) @ w.astype(np.float64), atol=2e-3)
        row, column = (slice(first, int(rng.integers(first, size)) + 1)
                       for size in (rows, columns) for first in [int(rng.integers(size))])  # fmt: skip
        compute = (product, looped)[int(rng.integers(2))]
        alone = jax.jit(functools.partial(compute, inner=inner))(x[row], w[:, column])
        within = jax.jit(lambda x, w: compute(x[row], w[:, column], inner=inner))(x, w)  # noqa: B023
        np.testing.assert_array_equal(alone, whole[row, column], err_msg=f"{x.shape} {w.shape} {row} {column} {inner}")
        np.testing.assert_array_equal(within, alone)


def test_a_sum_over_inputs_is_that_of_the_devices_parts():
    x, w = normal(3, 64), normal(64, 16)
    whole = jax.jit(lambda x, w: product(x, w, inner=8))(x, w)
    halves = [jax.jit(lambda x, w: product(x, w, inner=4))(x[:, i : i + 32], w[i : i + 32]) for i in (0, 32)]
    np.testing.assert_array_equal(add_blocks(jnp.stack(halves)), whole)
