"""Arrays on other meshes are seen on one of them, by reference where that means the same."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.placement import LazyWeight, on_one_mesh, view
from lockstep.placement.one_mesh import equivalent

AUTO = AxisType.Auto


def mesh_of(shape, names, order=None):
    devices = np.array(jax.devices()[:4])[order if order is not None else np.arange(4)]
    return Mesh(devices.reshape(shape), names, axis_types=(AUTO,) * len(names))


def test_arrays_of_explicit_axes_are_seen_on_auto_axes_by_reference():
    devices, names = np.array(jax.devices()[:2]), ("data",)
    where = NamedSharding(Mesh(devices, names, axis_types=(AxisType.Explicit,)), PartitionSpec("data"))
    array = jax.device_put(np.arange(8.0, dtype=np.float32).reshape(4, 2), where)
    weights = {"plain": array, "lazy": view([array, array], "a b -> b a"), "host": np.ones(2)}
    struct = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), array)
    seen = on_one_mesh({**weights, "struct": struct})
    assert seen["host"] is weights["host"]
    for each in (seen["plain"], *seen["lazy"].parts[0], seen["struct"]):
        assert each.sharding.mesh.axis_types == (AxisType.Auto,) and each.sharding.spec == where.spec
    assert seen["lazy"].sharding.mesh.axis_types == (AxisType.Auto,)
    assert on_one_mesh(seen)["plain"] is seen["plain"]
    for have, want in zip(seen["plain"].addressable_shards, array.addressable_shards, strict=True):
        assert have.data.unsafe_buffer_pointer() == want.data.unsafe_buffer_pointer()
    np.testing.assert_array_equal(seen["plain"], array)


REFERENCE = mesh_of((2, 2), ("fsdp", "tp"))


@pytest.mark.parametrize(
    ("mesh", "spec", "meaning"),
    [
        (mesh_of((2, 2), ("x", "y")), ("x", "y"), ("fsdp", "tp")),
        (mesh_of((4,), ("x",)), ("x",), (("fsdp", "tp"),)),
        (mesh_of((4,), ("x",)), (None, "x"), (None, ("fsdp", "tp"))),
        (mesh_of((4, 1), ("x", "y")), (("x", "y"),), (("fsdp", "tp"),)),
        (mesh_of((2, 2), ("x", "y"), [0, 2, 1, 3]), ("x", "y"), ("tp", "fsdp")),
        (mesh_of((4,), ("x",), [3, 2, 1, 0]), (), (None, None)),
        (mesh_of((4,), ("x",), [3, 2, 1, 0]), ("x",), None),
    ],
)
def test_a_sharding_on_another_mesh_is_one_of_this_mesh_where_each_device_has_the_same(mesh, spec, meaning):
    where = NamedSharding(mesh, PartitionSpec(*spec))
    same = equivalent(where, (8, 8), REFERENCE)
    assert (same and same.spec) == (meaning and PartitionSpec(*meaning, *(None,) * (2 - len(meaning))))
    array = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), where)
    first = jax.device_put(np.zeros(4, np.float32), NamedSharding(REFERENCE, PartitionSpec()))
    seen = on_one_mesh([first, array])[1]
    if meaning is None:
        assert seen is array
        return
    assert seen.sharding.mesh == REFERENCE
    pointers = [{s.device: s.data.unsafe_buffer_pointer() for s in a.addressable_shards} for a in (array, seen)]
    assert pointers[0] == pointers[1]
    np.testing.assert_array_equal(seen, array)


def test_what_the_mesh_cannot_say_is_moved():
    mesh = mesh_of((4,), ("data",))
    first = jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh, PartitionSpec()))
    where = NamedSharding(REFERENCE, PartitionSpec("fsdp", "tp"))
    seen = on_one_mesh([first, jax.device_put(np.zeros((8, 8), np.float32), where)])[1]
    assert isinstance(seen, LazyWeight) and seen.sharding == NamedSharding(mesh, PartitionSpec(("data",)))
    assert seen.blocks == (seen.sharding,)
