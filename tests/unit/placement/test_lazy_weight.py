"""Weights made while they are moved: on every mesh and layout, from every form, equal to the ones made beforehand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.models import TENSOR_DIMS, DecoderWeights
from lockstep.placement import LazyWeight, layer_differences, on_one_mesh, place, view
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


def joint_forms(weights: DecoderWeights, by_layer: bool, split: str) -> DecoderWeights:
    """q, k and v from one array whose last axis has their heads one after the other, gate and up from another one."""
    layers, mesh = weights.layers, weights.embed.sharding.mesh
    host = {name: np.asarray(getattr(layers, name)) for name in ("q", "k", "v", "gate", "up")}
    count, embed = host["q"].shape[:2]
    heads, kv, size = host["q"][0, 0].size // host["q"].shape[-1], host["k"].shape[2], host["k"].shape[3]
    qkv = np.concatenate([host[name].reshape(count, embed, -1) for name in "qkv"], axis=2)
    both = np.stack([host["gate"], host["up"]], axis=2).reshape(count, embed, -1)  # all of gate, then all of up
    pairs = np.stack([host["gate"], host["up"]], axis=3).reshape(count, embed, -1)  # gate and up of each in turn

    def stored(array):
        if by_layer:
            where = NamedSharding(mesh, PartitionSpec(None, split))
            return [place(np.ascontiguousarray(one), where) for one in array], ""
        return place(array, NamedSharding(mesh, PartitionSpec(None, None, split))), "layer "

    (qkv, one), (both, _), (pairs, _) = map(stored, (qkv, both, pairs))
    kv_heads = f"{one}embed (part head) -> {one}embed part head"
    ends = heads, heads + kv, heads + 2 * kv
    q = view(qkv, kv_heads, part=slice(0, heads), head=size)
    k, v = (view(qkv, kv_heads, part=slice(ends[i], ends[i + 1]), head=size) for i in (0, 1))
    gate = view(both, f"{one}embed (two mlp) -> {one}embed mlp", two=(0, 2))
    up = view(pairs, f"{one}embed (mlp two) -> {one}embed mlp", two=(1, 2))
    assert up.sharding.spec[-1] == (split or None) and gate.sharding.spec[-1] is None
    return dataclasses.replace(weights, layers=dataclasses.replace(layers, q=q, k=k, v=v, gate=gate, up=up))


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(("mesh", "tensor", "split"), [("1,2,2", 2, "tp"), ("1,4,1", 1, "fsdp"), ("1,1,1", 1, None)])
def test_parts_of_joint_axes_are_what_the_weights_were(mesh, tensor, split, by_layer):
    decode_mesh = make_decode_mesh(mesh_of(mesh), tensor)
    plain = tiny.placed_weights(mesh_of(mesh))
    stored = joint_forms(plain, by_layer, split)
    layouts = leaf_layouts(stored, decode_mesh, TENSOR_DIMS)
    make, _ = assembly_function(stored, layouts, jnp.dtype(jnp.float32), gather=True)
    with jax.set_mesh(decode_mesh.mesh):
        program = str(jax.make_jaxpr(make)(sources(stored)))
        made = jax.jit(make)(sources(stored))
    joint = f"f32[{tiny.CONFIG.hidden_dim},{2 * tiny.CONFIG.intermediate_dim}] = all_gather["
    assert program.count(joint) == (split is not None), "the joint array is gathered a layer at a time"
    for name in ("q", "k", "v", "gate", "up"):
        want = np.asarray(getattr(plain.layers, name))
        np.testing.assert_array_equal(np.asarray(getattr(made.layers, name)).reshape(want.shape), want, err_msg=name)


def test_an_index_of_an_axis_that_devices_share_is_the_index_of_the_whole_axis():
    mesh = mesh_of("1,2,1")
    host = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    array = place(host, NamedSharding(mesh, PartitionSpec("fsdp")))
    found = view(array, "four embed -> embed", four=3)
    (whole,) = found.blocks
    assert whole.spec == PartitionSpec(None, None) and found.sharding.spec == PartitionSpec(None)
    np.testing.assert_array_equal(found.assemble(jax.device_put(array, whole)), host[3])


def test_a_view_that_changes_nothing_is_the_array():
    array = jnp.zeros((2, 3))
    assert view(array, "a b -> a b") is array
    turned = view(array, "a b -> b a")
    assert isinstance(turned, LazyWeight) and turned.shape == (3, 2) and turned.parts[0] is array
    assert dataclasses.replace(turned, parts=()) == dataclasses.replace(view(array, "a b -> b a"), parts=())


@pytest.mark.parametrize(
    ("shape", "pattern", "picks", "text"),
    [
        ((2, 3), "a -> a", {}, r"does not fit an array of shape .* Correct it, or pass one model"),
        ((2, 3), "a b -> b", {}, "every axis must be wanted or picked"),
        ((2, 3), "a b -> b a c", {}, "does not fit"),
        ((2, 3), "layer a -> a layer", {}, "the layer is the first of the weight"),
        ((2, 3), "a b -> b a", {"c": 1}, "does not fit"),
        ((2, 6), "a (b c) -> a c", {"b": 0}, r"how large b and c are, which are 6 together.*c=SIZE .* b=\(INDEX, SIZE"),
        ((2, 6), "a (b c) -> a b c", {"c": 4}, "b 1 x c 4 is not the size of the array's axis, 6"),
        ((2, 6), "a (b c) -> a c", {"b": (3, 3)}, r"cannot take b=\(3, 3\) of an axis of 3"),
        ((2, 6), "a b -> a b", {"b": slice(4, 9)}, "cannot take b=slice"),
        ((2, 6), "a b -> a", {"b": slice(4, 5)}, "of another one an index"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(shape, pattern, picks, text):
    with pytest.raises(ConfigError, match=text):
        view(np.zeros(shape), pattern, **picks)


@pytest.mark.parametrize(("mesh", "tensor"), [("1,2,2", 2), ("1,4,1", 1)])
@pytest.mark.parametrize("axis", [1, -1])
def test_layers_along_any_axis_are_made_into_the_weight(mesh, tensor, axis):
    """MaxText's ``param_scan_axis`` is 1."""
    mesh = mesh_of(mesh)
    plain = tiny.placed_weights(mesh)

    def elsewhere(path, leaf):
        if path[0].name != "layers":
            return leaf
        names = ["layer", *(f"axis{i}" for i in range(1, leaf.ndim))]
        order = [*range(1, leaf.ndim)]
        order.insert(len(order) if axis == -1 else axis, 0)
        spec = (*leaf.sharding.spec, *(None,) * leaf.ndim)[: leaf.ndim]
        where = NamedSharding(mesh, PartitionSpec(*(spec[i] for i in order)))
        stored = place(np.ascontiguousarray(np.asarray(leaf).transpose(order)), where)
        return view(stored, f"{' '.join(names[i] for i in order)} -> {' '.join(names)}")

    stored = jax.tree_util.tree_map_with_path(elsewhere, plain)
    decode_mesh = make_decode_mesh(mesh, tensor)
    layouts = leaf_layouts(stored, decode_mesh, TENSOR_DIMS)
    assert layouts == leaf_layouts(plain, decode_mesh, TENSOR_DIMS)
    make, _ = assembly_function(stored, layouts, jnp.dtype(jnp.float32), gather=True)
    with jax.set_mesh(decode_mesh.mesh):
        made = jax.jit(make)(sources(stored))
    for path, weight in jax.tree_util.tree_leaves_with_path(plain):
        (have,) = [leaf for at, leaf in jax.tree_util.tree_leaves_with_path(made) if at == path]
        np.testing.assert_array_equal(np.asarray(have), np.asarray(weight), err_msg=str(path))


def test_an_index_of_a_shared_axis_beside_layers_along_another_axis():
    """The whole of an axis that devices share is gathered a layer at a time, wherever the layer is."""
    mesh = mesh_of("1,4,1")
    plain = tiny.placed_weights(mesh)
    both = np.stack([np.asarray(plain.layers.gate), np.asarray(plain.layers.up)], axis=-1)  # layer embed mlp two
    joint = both.transpose(1, 0, 2, 3).reshape(both.shape[1], both.shape[0], -1)  # embed layer (mlp two)
    stored = place(np.ascontiguousarray(joint), NamedSharding(mesh, PartitionSpec(None, None, "fsdp")))
    pattern = "embed layer (mlp two) -> layer embed mlp"
    lazy = {name: view(stored, pattern, two=(at, 2)) for at, name in enumerate(("gate", "up"))}
    weights = dataclasses.replace(plain, layers=dataclasses.replace(plain.layers, **lazy))
    decode_mesh = make_decode_mesh(mesh, 1)
    layouts = leaf_layouts(weights, decode_mesh, TENSOR_DIMS)
    make, _ = assembly_function(weights, layouts, jnp.dtype(jnp.float32), gather=True)
    with jax.set_mesh(decode_mesh.mesh):
        made = jax.jit(make)(sources(weights))
    for name in lazy:
        np.testing.assert_array_equal(getattr(made.layers, name), getattr(plain.layers, name), err_msg=name)


def test_layers_that_differ_in_shape_are_refused():
    with pytest.raises(ConfigError, match=r"differ in shape: layer 0 is \(2, 3\) and layer 1 is \(2, 4\)"):
        view([jax.numpy.zeros((2, 3)), jax.numpy.zeros((2, 4))], "a b -> b a")


def renamed(spec):
    return tuple({"fsdp": "x", "tp": "y", None: None}[axis] for axis in spec)


SECOND_LAYER = {
    None: (None, lambda name, spec: spec),
    "norms whole": (None, lambda name, spec: () if "norm" in name else spec),
    "matrices whole, norms split": (None, lambda name, spec: ("fsdp",) if "norm" in name else ()),
    "another mesh that means the same": ((2, 2), lambda name, spec: renamed(spec)),
    "another mesh": ((4,), lambda name, spec: (*(None,) * (len(spec) - 1), "x")),
}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, np.float32) for case in list(SECOND_LAYER)[1:]), (None, jnp.bfloat16)]
)
def test_layers_that_differ_in_placement_or_dtype_are_brought_together(case, dtype):
    """The weights are the very numbers that were placed, whatever the layers have in common."""
    mesh, (shape, spec_of) = mesh_of("1,2,2"), SECOND_LAYER[case]
    other = mesh if shape is None else Mesh(mesh.devices.reshape(shape), ("x", "y")[: len(shape)])
    plain = tiny.placed_weights(mesh)

    def by_layer(path, leaf):
        if path[0].name != "layers":
            return leaf
        spec = (*leaf.sharding.spec, *(None,) * leaf.ndim)[1 : leaf.ndim]
        wheres = (
            NamedSharding(mesh, PartitionSpec(*spec)),
            NamedSharding(other, PartitionSpec(*spec_of(path[-1].name, spec))),
        )
        host = [np.asarray(leaf[0]), np.asarray(leaf[1]).astype(dtype)]
        names = " ".join(f"axis{i}" for i in range(1, leaf.ndim))
        layers = [place(np.ascontiguousarray(array), where) for array, where in zip(host, wheres, strict=True)]
        return view(layers, f"{names} -> {names}")

    stored = on_one_mesh(jax.tree_util.tree_map_with_path(by_layer, plain))
    decode_mesh = make_decode_mesh(mesh, 2)
    layouts = leaf_layouts(stored, decode_mesh, TENSOR_DIMS)
    make, _ = assembly_function(stored, layouts, jnp.dtype(jnp.bfloat16), gather=True)
    with jax.set_mesh(decode_mesh.mesh):
        made = jax.jit(make)(sources(stored))
    for path, weight in jax.tree_util.tree_leaves_with_path(plain):
        (have,) = [leaf for at, leaf in jax.tree_util.tree_leaves_with_path(made) if at == path]
        np.testing.assert_array_equal(np.asarray(have), np.asarray(weight).astype(jnp.bfloat16), err_msg=str(path))


def test_a_placement_is_the_same_however_it_is_written():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("fsdp", "tp"))
    specs = ("fsdp", "tp"), ("fsdp",), ("fsdp", None), (("fsdp", "tp"),), (("fsdp",), ())
    layers = [jax.ShapeDtypeStruct((4, 4), "float32", sharding=NamedSharding(mesh, PartitionSpec(*s))) for s in specs]
    assert layer_differences(layers) == [] and view(layers, "a b -> a b").blocks == ()


def test_layers_on_devices_in_another_order_are_refused_by_path_in_that_order():
    mesh = mesh_of("1,2,1")
    turned = Mesh(mesh.devices[:, ::-1], mesh.axis_names)
    plain = tiny.placed_weights(mesh)
    host = np.asarray(plain.layers.gate)
    layers = [place(host[i], NamedSharding(m, PartitionSpec("fsdp"))) for i, m in enumerate((mesh, turned))]
    gate = view(layers, "embed mlp -> embed mlp")
    stored = on_one_mesh(dataclasses.replace(plain, layers=dataclasses.replace(plain.layers, gate=gate)))
    with pytest.raises(ConfigError, match=r"layers\.gate of layer 1 is placed on 2 devices \(cpu:1, cpu:0 of process"):
        leaf_layouts(stored, make_decode_mesh(mesh, 1), TENSOR_DIMS)


def test_a_function_that_cannot_be_hashed_is_refused():
    @dataclasses.dataclass
    class Scale:
        by: float

        def __call__(self, block):
            return self.by * block

    with pytest.raises(ConfigError, match=r"Scale\(by=2.0\), cannot be hashed .*frozen dataclass"):
        LazyWeight(parts=(), assemble=Scale(by=2.0), shape=(1,), dtype=jnp.dtype("float32"), sharding=None)
