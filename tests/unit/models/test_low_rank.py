"""A linear layer with an adapter, and the weight that it amounts to."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import TENSOR_DIMS
from lockstep.models.low_rank import RANK, AdaptedWeight, LowRankPair, MergeLora, linear, merge_lora
from lockstep.placement import make_decode_mesh, place
from lockstep.placement.lazy_weight import sources
from lockstep.placement.leaf_layout import leaf_layouts
from lockstep.placement.reshard import assembly_function
from tests import tiny
from tests.unit.engine.models import mesh_of

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exact_merge_has_the_same_bits_in_any_part_and_is_of_rounded_factors(dtype):
    rng = np.random.default_rng(0)
    w, a, b = (jnp.asarray(rng.standard_normal(shape), "float32") for shape in ((24, 3, 8), (24, 11), (11, 3, 8)))
    merge = MergeLora(equation="er,rhd->ehd", scale=0.37, exact=dtype)
    assert merge.factor_specs(("fsdp", "tp", None), None) == (("fsdp", None), (None, "tp", None))
    whole = np.asarray(jax.jit(merge)(w, a, b))
    wide = [np.asarray(each.astype(dtype), np.float64) for each in (w, a, b)]
    np.testing.assert_allclose(whole, wide[0] + 0.37 * np.einsum("er,rhd->ehd", *wide[1:]), rtol=1e-5, atol=1e-5)
    for rows, heads, columns in (
        (slice(5, 6), slice(0, 3), slice(0, 8)),
        (slice(0, 24), slice(1, 2), slice(3, 4)),
        (slice(7, 23), slice(0, 2), slice(1, 8)),
    ):
        part = w[rows, heads, columns], a[rows], b[:, heads, columns]
        np.testing.assert_array_equal(jax.jit(merge)(*part), whole[rows, heads, columns])
    np.testing.assert_array_equal(jax.jit(jax.vmap(merge))(*(jnp.stack([each] * 2) for each in (w, a, b)))[1], whole)
    mesh = mesh_of("1,2,2")
    specs = jax.P("fsdp", None, "tp"), jax.P("fsdp"), jax.P(None, None, "tp")
    with jax.set_mesh(mesh):
        split = [jax.device_put(*each) for each in zip((w, a, b), specs, strict=True)]
        np.testing.assert_array_equal(jax.jit(merge, out_shardings=specs[0])(*split), whole)


def test_an_exact_merge_of_experts_has_the_same_bits_in_any_part():
    rng = np.random.default_rng(0)
    w, a, b = (jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in ((5, 8, 6), (5, 8, 3), (5, 3, 6)))
    merge = MergeLora(equation="xer,xrm->xem", scale=0.37, exact="bfloat16")
    assert merge.factor_specs(("dp", "fsdp", "tp"), None) == (("dp", "fsdp", None), ("dp", None, "tp"))
    whole = np.asarray(jax.jit(merge)(w, a, b))
    for experts, columns in ((slice(2, 3), slice(0, 6)), (slice(1, 5), slice(1, 3))):
        part = w[experts, :, columns], a[experts], b[experts, :, columns]
        np.testing.assert_array_equal(jax.jit(merge)(*part), whole[experts, :, columns])
    alone = [MergeLora(equation="er,rm->em", scale=0.37, exact="bfloat16")(*each) for each in zip(w, a, b, strict=True)]
    np.testing.assert_array_equal(np.stack(alone), whole)


QKV = "embed kv group head, embed rank, rank (kv group head) -> embed kv group head"


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("layer_axis", [None, 0, 1])
def test_factors_are_brought_to_the_blocks_of_their_weight(tensor, layer_axis):
    """The weight is split over both axes of the mesh; one factor is whole everywhere, one is split elsewhere."""
    mesh, rng = mesh_of("1,2,2"), np.random.default_rng(0)
    weights = tiny.placed_weights(mesh)
    q = np.asarray(weights.layers.q)
    a, b = (rng.standard_normal((len(q), *shape)).astype(np.float32) for shape in ((q.shape[1], 2), (2, q[0, 0].size)))
    arrays = [(q, ("fsdp", "tp")), (a, ()), (b, ("tp", "fsdp"))]
    if layer_axis is None:
        on = [[place(one, jax.NamedSharding(mesh, jax.P(*spec))) for one in array] for array, spec in arrays]
        lazy = merge_lora(*on, QKV, scale=SCALE)
    else:
        on = []
        for array, spec in arrays:
            where = [*spec, None, None][: array.ndim - 1]
            where.insert(layer_axis, None)
            on.append(place(np.moveaxis(array, 0, layer_axis), jax.NamedSharding(mesh, jax.P(*where))))
        left, want = QKV.split(" -> ")
        sides = [side.split() for side in left.replace("(kv group head)", "kv-group-head").split(", ")]
        for side in sides:
            side.insert(layer_axis, "layer")
        pattern = ", ".join(map(" ".join, sides)).replace("kv-group-head", "(kv group head)")
        lazy = merge_lora(*on, f"{pattern} -> layer {want}", scale=SCALE)
    adapted = dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, q=lazy))
    decode_mesh = make_decode_mesh(mesh, tensor)
    layouts = leaf_layouts(adapted, decode_mesh, TENSOR_DIMS)
    assert layouts == leaf_layouts(weights, decode_mesh, TENSOR_DIMS)
    make, _ = assembly_function(adapted, layouts, jnp.dtype(jnp.float32), gather=True)
    with jax.set_mesh(decode_mesh.mesh):
        made = jax.jit(make)(sources(adapted))
    expected = q + SCALE * np.einsum("ler,lro->leo", a, b).reshape(q.shape)
    np.testing.assert_allclose(np.asarray(made.layers.q), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a b -> a b", "does not have the form"),
        ("a b, a r, s b -> a b", "both factors must have one axis that the weight does not have"),
        ("a b, a r, r -> a b", "both factors must have"),
        ("layer b, r layer, layer r b -> layer b", "has the layer on other axes of a factor than of the weight"),
        ("a b, b r, r a -> a b", r"a factor has shape \(5, 2\), and the pattern with the weight's \(5, 7\)"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(pattern, text):
    with pytest.raises(ConfigError, match=text):
        merge_lora(np.ones((5, 7)), np.ones((5, 2)), np.ones((2, 7)), pattern, scale=1.0)


def test_lists_must_fit_each_other():
    w, a, b = np.ones((5, 7)), np.ones((5, 2)), np.ones((2, 7))
    with pytest.raises(ConfigError, match="different numbers of layers"):
        merge_lora([w, w], [a, a], [b], "a b, a r, r b -> a b", scale=1.0)
    with pytest.raises(ConfigError, match="some of weight, a and b are lists"):
        merge_lora([w], [a], b, "a b, a r, r b -> a b", scale=1.0)
