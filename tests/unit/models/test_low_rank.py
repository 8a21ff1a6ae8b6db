"""A linear layer with an adapter, and the weight that it amounts to."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models.low_rank import RANK, AdaptedWeight, LowRankPair, MergeLora, linear

In, Out, Rank, Row = hax.make_axes(embed=5, mlp=7, **{RANK: 2}, row=3)
SCALE = 1.5


def draw(*axes):
    return hax.named(np.random.default_rng(len(axes) + axes[0].size).standard_normal([a.size for a in axes]), axes)


X, W, A, B = draw(Row, In), draw(In, Out), draw(In, Rank), draw(Rank, Out)


def adapted(a=A, b=B):
    return AdaptedWeight(weight=W, pair=LowRankPair(a=a, b=b), scale=SCALE)


def test_a_layer_computes_as_with_the_sum():
    x, w, a, b = (np.asarray(each.array, np.float64) for each in (X, W, A, B))
    got = linear(X, adapted(), "embed")
    assert got.axes == (Row, Out)
    np.testing.assert_allclose(got.array, x @ (w + SCALE * a @ b), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(linear(X, W, "embed").array, hax.dot(X, W, axis="embed").array)


def test_with_a_zero_factor_it_is_the_weight_alone_to_the_bit():
    zero = adapted(b=hax.zeros_like(B))
    np.testing.assert_array_equal(linear(X, zero, "embed").array, hax.dot(X, W, axis="embed").array)


def test_gradients_are_those_of_the_sum():
    def ours(factors):
        return jnp.sum(jnp.sin(linear(X, adapted(*factors), "embed").array))

    def oracle(a, b):
        return jnp.sum(jnp.sin(X.array @ (W.array + SCALE * a @ b)))

    for got, expected in zip(jax.grad(ours)((A, B)), jax.grad(oracle, (0, 1))(A.array, B.array), strict=True):
        np.testing.assert_allclose(got.array, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_weight_is_the_sum_in_float32(dtype):
    w = W.array.astype(dtype)
    got = MergeLora(equation="er,rm->em", scale=SCALE)(w, A.array, B.array)
    expected = np.asarray(w, np.float64) + SCALE * np.asarray(A.array, np.float64) @ np.asarray(B.array, np.float64)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
