"""Weights made while they are moved: on every mesh and layout, from every form, equal to the ones made beforehand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.models import TENSOR_DIMS, DecoderWeights
from lockstep.placement import LazyWeight, place, view
from lockstep.placement.decode_mesh import make_decode_mesh
from lockstep.placement.lazy_weight import is_lazy, sources
from lockstep.placement.leaf_layout import leaf_layouts
from lockstep.placement.reshard import assembly_function, reshard_function
from tests import tiny
from tests.unit.engine.models import mesh_of

FORMS = {
    "q": ("layer embed kv group head", "layer kv group head embed"),
    "o": ("layer kv group head embed", "layer embed kv group head"),
    "gate": ("layer embed mlp", "layer mlp embed"),
    "lm_head": ("embed vocab", "vocab embed"),
}


def other_form(weights: DecoderWeights, by_layer: bool) -> DecoderWeights:
    """The same weights from arrays with other axis orders, or from one array per layer."""

    def change(path, leaf):
        name = path[-1].name
        want, have = FORMS.get(name, (None, None))
        host, spec = np.asarray(leaf), leaf.sharding.spec + (None,) * (leaf.ndim - len(leaf.sharding.spec))
        if want is not None:
            order = [want.split().index(axis) for axis in have.split()]
            host, spec = host.transpose(order), tuple(spec[axis] for axis in order)
        layered = by_layer and path[0].name == "layers"
        if want is None and not layered:
            return leaf
        if not layered:
            return view(place(host, NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))), f"{have} -> {want}")
        names = " ".join(f"axis{i}" for i in range(1, host.ndim)) if have is None else have.removeprefix("layer ")
        where = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec[1:]))
        layers = [place(np.ascontiguousarray(one), where) for one in host]
        return view(layers, f"{names} -> {names if want is None else want.removeprefix('layer ')}")

    return jax.tree_util.tree_map_with_path(change, weights)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(("mesh", "tensor"), [("1,4,1", 1), ("1,2,2", 2), ("2,2,1", None), ("1,1,1", 1)])
def test_what_is_made_is_what_would_have_been_moved(mesh, tensor, by_layer):
    decode_mesh = make_decode_mesh(mesh_of(mesh), tensor or 1)
    plain = tiny.placed_weights(mesh_of(mesh))
    stored = other_form(plain, by_layer)
    assert is_lazy(stored) and not is_lazy(plain)
    layouts = leaf_layouts(stored, decode_mesh, TENSOR_DIMS)
    assert layouts == leaf_layouts(plain, decode_mesh, TENSOR_DIMS)
    dtype = jnp.dtype(jnp.bfloat16)
    move, target = reshard_function(layouts, dtype, gather=tensor is not None)
    make, made_target = assembly_function(stored, layouts, dtype, gather=tensor is not None)
    assert made_target == target
    with jax.set_mesh(decode_mesh.mesh):
        expected, made = jax.jit(move)(plain), jax.jit(make)(sources(stored))
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        (have,) = [leaf for at, leaf in jax.tree_util.tree_leaves_with_path(made) if at == path]
        np.testing.assert_array_equal(np.asarray(have), np.asarray(want), err_msg=jax.tree_util.keystr(path))
        assert have.dtype == dtype


def test_a_view_that_changes_nothing_is_the_array():
    array = jnp.zeros((2, 3))
    assert view(array, "a b -> a b") is array
    turned = view(array, "a b -> b a")
    assert isinstance(turned, LazyWeight) and turned.shape == (3, 2) and turned.parts[0] is array
    assert dataclasses.replace(turned, parts=()) == dataclasses.replace(view(array, "a b -> b a"), parts=())


@pytest.mark.parametrize(
    ("shape", "pattern", "picks", "text"),
    [
        ((2, 3), "a -> a", {}, "does not fit an array of shape"),
        ((2, 3), "a b -> b", {}, "every axis must be wanted or picked"),
        ((2, 3), "a b -> b a c", {}, "does not fit"),
        ((2, 3), "a layer -> layer a", {}, "the layer first"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(shape, pattern, picks, text):
    with pytest.raises(ConfigError, match=text):
        view(np.zeros(shape), pattern, **picks)


def test_layers_that_differ_are_refused():
    with pytest.raises(ConfigError, match="the layers of a weight differ"):
        view([jax.numpy.zeros((2, 3)), jax.numpy.zeros((2, 4))], "a b -> b a")
