import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.placement import make_mesh
from lockstep.placement.decode_mesh import make_decode_mesh, tensor_sizes

MESHES = ["1,4,1", "2,2,1", "1,2,2", "4,1,1", "2,4,1", "1,1,1", "1,1,4", "1,6,2", "2,3,2", "1,2,4"]


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "tpu"


def fake_mesh(shape: str) -> Mesh:
    count = math.prod(int(size) for size in shape.split(","))
    devices: Any = [FakeDevice(7 * i % 31) for i in range(count)]
    return make_mesh(shape, devices)


@pytest.mark.parametrize(
    ("shape", "tensor"), [(s, t) for s in MESHES for t in (1, 2, 4) if t in tensor_sizes(fake_mesh(s))]
)
def test_the_grid_keeps_the_devices_in_order_and_names_every_axis(shape: str, tensor: int) -> None:
    mesh = fake_mesh(shape)
    decode_mesh = make_decode_mesh(mesh, tensor)
    assert list(decode_mesh.mesh.devices.flat) == list(mesh.devices.flat)
    assert (decode_mesh.replicas, decode_mesh.tensor) == (mesh.size // tensor, tensor)
    assert decode_mesh.replica_axes + decode_mesh.tensor_axes == (decode_mesh.mesh.axis_names if mesh.size > 1 else ())
    assert set(decode_mesh.mesh.axis_types) == {AxisType.Auto}
    # A replica is `tensor` consecutive devices.
    numbers = np.arange(mesh.size).reshape(decode_mesh.mesh.devices.shape)
    rows = numbers.reshape(decode_mesh.replicas, decode_mesh.tensor)
    assert (np.diff(rows, axis=1) == 1).all()
    # A training axis and the decode mesh axes that make it up put every device at the same place.
    for axis, name in enumerate(mesh.axis_names):
        place = np.indices(mesh.devices.shape)[axis].reshape(-1)
        refined = np.zeros(mesh.size, int)
        for part in decode_mesh.training_axes[name]:
            at = decode_mesh.mesh.axis_names.index(part)
            refined = refined * decode_mesh.mesh.shape[part] + np.indices(decode_mesh.mesh.devices.shape)[at].reshape(
                -1
            )
        np.testing.assert_array_equal(refined, place, err_msg=name)


@pytest.mark.parametrize("shape", MESHES)
def test_a_size_is_refused_with_exactly_the_sizes_that_work(shape: str) -> None:
    mesh = fake_mesh(shape)
    works = []
    for tensor in range(1, 2 * mesh.size + 1):
        try:
            works.append(make_decode_mesh(mesh, tensor).tensor)
        except ConfigError as error:
            message = str(error)
            assert f"layout {{tensor: {tensor}}} does not fit the mesh" in message
            assert message.endswith(f"Set tensor to one of {tensor_sizes(mesh)}.")
    assert works == tensor_sizes(mesh)
    assert 1 in works and mesh.size in works


@pytest.mark.parametrize(
    ("shape", "works"),
    [("1,4,1", [1, 2, 4]), ("2,4,1", [1, 2, 4, 8]), ("2,3,2", [1, 2, 6, 12]), ("1,6,2", [1, 2, 4, 6, 12])],
)
def test_sizes_that_nest(shape: str, works: list[int]) -> None:
    assert tensor_sizes(fake_mesh(shape)) == works


def test_a_replica_stays_inside_a_slice() -> None:
    devices: Any = [FakeDevice(i, i // 2, i // 4) for i in range(8)]
    mesh = make_mesh("auto", devices)
    assert dict(mesh.shape) == {"dcn": 2, "dp": 1, "fsdp": 4, "tp": 1}
    assert tensor_sizes(mesh) == make_decode_mesh(mesh, 2).tensor_sizes == [1, 2, 4]
    with pytest.raises(ConfigError, match=r"tensor: 8.*stay inside a slice. Set tensor to one of \[1, 2, 4\]"):
        make_decode_mesh(mesh, 8)


SPECS = [
    PartitionSpec(),
    PartitionSpec("fsdp"),
    PartitionSpec(None, "tp"),
    PartitionSpec("tp", "fsdp"),
    PartitionSpec(("dp", "fsdp"), "tp"),
    PartitionSpec(("fsdp", "tp")),
]


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("shape", ["1,4,1", "2,2,1", "1,2,2", "4,1,1"])
def test_the_refined_spec_is_the_same_place(shape: str, tensor: int) -> None:
    mesh = make_mesh(shape, jax.devices()[:4])
    decode_mesh = make_decode_mesh(mesh, tensor)
    for spec in SPECS:
        there = NamedSharding(mesh, spec)
        struct = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=there)
        here = NamedSharding(decode_mesh.mesh, decode_mesh.training_spec(struct, "weight"))
        assert here.devices_indices_map((8, 8)) == there.devices_indices_map((8, 8)), spec


def struct_on(mesh: Mesh, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def test_weights_that_lie_elsewhere_are_refused_by_name() -> None:
    devices = jax.devices()[:4]
    decode_mesh = make_decode_mesh(make_mesh("1,4,1", devices), 2)
    one = jax.sharding.SingleDeviceSharding(devices[0])
    names = ("dp", "fsdp", "tp")
    elsewhere = {
        "one device": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=one),
        "another shape": struct_on(make_mesh("2,2,1", devices), "fsdp"),
        "two devices": struct_on(make_mesh("1,2,1", devices[:2]), "fsdp"),
        "another order": struct_on(Mesh(np.array(devices[::-1]).reshape(1, 4, 1), names), "fsdp"),
        "other axes": struct_on(Mesh(np.array(devices).reshape(1, 4), ("replica", "data")), "data"),
    }
    for kind, struct in elsewhere.items():
        with pytest.raises(ConfigError, match=r"the weight \.layers\.q is placed on .* devices") as error:
            decode_mesh.training_spec(struct, ".layers.q")
        other = kind.endswith(("device", "devices"))
        assert ("Make the whole model there: jax.jit(" if other else "Place it there: jax.device_put(") in str(
            error.value
        )
    with pytest.raises(ConfigError, match=r"the weight \.embed is placed in host memory"):
        decode_mesh.training_spec(np.zeros((8, 8)), ".embed")  # type: ignore[arg-type] (wrong on purpose)


def test_one_device_means_this_device() -> None:
    first, second = jax.devices()[:2]
    decode_mesh = make_decode_mesh(make_mesh("1,1,1", [first]), 1)
    here, there = (
        jax.ShapeDtypeStruct((8,), np.float32, sharding=jax.sharding.SingleDeviceSharding(d)) for d in (first, second)
    )
    assert decode_mesh.training_spec(here, "w") == PartitionSpec()
    with pytest.raises(ConfigError, match="the weight w is placed on 1 devices"):
        decode_mesh.training_spec(there, "w")
