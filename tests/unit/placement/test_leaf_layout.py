"""How a device gets its part of a weight, from every layout."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.models import TENSOR_DIMS
from lockstep.placement import place
from lockstep.placement.decode_mesh import make_decode_mesh
from lockstep.placement.leaf_layout import LeafLayout, leaf_layouts, partition_specs, read
from tests.unit.placement.layouts import check_shards, decode_mesh_of, every_spec, weights_on


@pytest.mark.parametrize(("shape", "tensor"), [("1,2,2", 2), ("1,2,2", 4), ("1,4,1", 2), ("4,1,1", 1)])
def test_read_from_every_layout(shape: str, tensor: int) -> None:
    decode_mesh = decode_mesh_of(shape, tensor)
    layouts = [
        LeafLayout(decode_mesh, spec, dim)
        for spec in every_spec(decode_mesh, 2)
        for dim in (None, 0, 1)
        if not (spec[0] and spec[1] and dim is None)
    ]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((4, 8), np.float32) for _ in layouts]
    placed = [place(a, NamedSharding(decode_mesh.mesh, x.partition_spec)) for a, x in zip(arrays, layouts, strict=True)]
    moved = jax.shard_map(
        functools.partial(read, layouts),
        mesh=decode_mesh.mesh,
        in_specs=(partition_specs(layouts),),
        out_specs=partition_specs([layout.decode for layout in layouts]),
        check_vma=False,
    )
    for resharded, array, layout in zip(jax.jit(moved)(placed), arrays, layouts, strict=True):
        check_shards(resharded, array, layout)


def text_of(layout: LeafLayout, shape: tuple[int, ...]) -> str:
    moved = jax.shard_map(
        layout.read,
        mesh=layout.decode_mesh.mesh,
        in_specs=layout.partition_spec,
        out_specs=layout.decode.partition_spec,
        check_vma=False,
    )
    sharding = NamedSharding(layout.decode_mesh.mesh, layout.partition_spec)
    return jax.jit(moved).lower(jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)).as_text()


def test_which_collectives_move_a_weight() -> None:
    decode_mesh = decode_mesh_of("1,4,1", 2)
    both = decode_mesh.replica_axes + decode_mesh.tensor_axes
    swapped = text_of(LeafLayout(decode_mesh, (both, ()), 1), (8, 8))
    assert "all_to_all" in swapped and "all_gather" in swapped
    odd = text_of(LeafLayout(decode_mesh, (both, ()), 1), (8, 7))
    assert "all_to_all" not in odd, "a vocabulary of 7 cannot be swapped between 2 devices"
    here = text_of(LeafLayout(decode_mesh, ((), decode_mesh.tensor_axes), 1), (8, 8))
    assert "all_to_all" not in here and "all_gather" not in here, "it lies there already"


def test_a_weight_on_other_devices_is_refused_by_its_path() -> None:
    _, placed, mesh = weights_on("1,2,2", 8)
    stray = jax.device_put(np.ones((2, 8, 8), np.float32), jax.devices()[3])
    broken = dataclasses.replace(placed, layers=dataclasses.replace(placed.layers, up=stray))
    with pytest.raises(ConfigError, match=r"the weight layers.up is placed on 1 devices"):
        leaf_layouts(broken, make_decode_mesh(mesh, 2), TENSOR_DIMS)


def test_in_the_decode_layout_only_the_tensor_axes_split_a_weight() -> None:
    decode_mesh = decode_mesh_of("1,2,2", 2)
    layout = LeafLayout(decode_mesh, (decode_mesh.replica_axes, (), decode_mesh.tensor_axes), 1)
    assert layout.decode.spec == ((), decode_mesh.tensor_axes, ())
    assert LeafLayout(decode_mesh, layout.spec, None).decode.spec == ((), (), ())


def test_the_layout_of_a_layer_has_one_axis_less() -> None:
    decode_mesh = decode_mesh_of("1,2,2", 2)
    stacked = LeafLayout(decode_mesh, ((), decode_mesh.replica_axes, decode_mesh.tensor_axes), 2)
    assert stacked.drop_layer() == LeafLayout(decode_mesh, (decode_mesh.replica_axes, decode_mesh.tensor_axes), 1)
    assert LeafLayout(decode_mesh, stacked.spec, None).drop_layer().tensor_dim is None


def test_an_axis_that_nothing_splits_is_none_in_the_partition_spec() -> None:
    decode_mesh = decode_mesh_of("1,2,2", 2)
    layout = LeafLayout(decode_mesh, ((), decode_mesh.tensor_axes), None)
    assert layout.partition_spec == PartitionSpec(None, decode_mesh.tensor_axes)
