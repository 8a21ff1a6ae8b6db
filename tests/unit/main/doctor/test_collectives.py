"""Groups of devices, what their collectives compute, and what is said of their seconds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.doctor.collectives import CollectiveTime, Group, build_loops, find_groups, judge_collectives
from lockstep.placement import make_mesh
from lockstep.placement.device import chip_named

V5P = chip_named("TPU v5p", "tpu")


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    coords: tuple[int, ...]
    device_kind: str = "TPU v5p"
    platform: str = "tpu"
    slice_index: int = 0


def pod(shape, hosts=2, slices=1):
    devices = [Device(i, i * hosts // 8, (i % 2, i // 2 % 2, i // 4), slice_index=i * slices // 8) for i in range(8)]
    grid = np.empty(8, object)
    grid[:] = devices
    return Mesh(grid.reshape(shape), ("dcn", "dp", "fsdp", "tp")[-len(shape) :])


def test_each_division_of_the_devices_is_measured_once():
    assert [(group.name, group.members) for group in find_groups(make_mesh("1,2,2", jax.devices()[:4]))] == [
        ("fsdp", 2),
        ("tp", 2),
        ("all devices", 4),
    ]
    assert find_groups(make_mesh("auto", jax.devices()[:1])) == []


def test_hosts_and_hops_of_groups():
    groups = {group.name: group for group in find_groups(pod((1, 4, 2)))}
    assert {name: (one.members, one.crosses_hosts, one.hops) for name, one in groups.items()} == {
        "fsdp": (4, True, 2),
        "tp": (2, False, 1),
        "all devices": (8, True, 3),
        "the devices of a host": (4, False, 2),
        "one device of each host": (2, True, 1),
    }


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_a_loop_is_the_collective(kind):
    group = find_groups(make_mesh("1,2,2", jax.devices()[:4]))[0]
    (loop,) = build_loops(Hosts(MemoryClient.hub(1)[0]), [(group, kind, 32)])
    assert kind in loop.run.text() and "while" in loop.run.text()
    ones = loop.fill()
    x = jax.device_put(jnp.repeat(jnp.arange(4.0), 8), ones.sharding)
    count = jax.device_put(jnp.int32(1), jax.NamedSharding(group.mesh, jax.P()))
    found = np.asarray(loop.run(x, count))[::8]
    # Groups are of the devices 0 and 2, 1 and 3; the mesh of the group has them next to each other.
    assert found.tolist() == ([0.5, 0.5, 2.5, 2.5] if kind == "all-reduce" else [1, 1, 3, 3])


def measured(seconds, kind="all-reduce", size=64 << 20, group=None):
    group = group or find_groups(pod((1, 8, 1)))[0]
    return CollectiveTime(group=group, kind=kind, size=size, seconds=seconds)


def test_the_prediction_is_that_of_a_ring():
    one = measured(1.0)
    assert one.received == 2 * 7 / 8 * (64 << 20)
    assert one.predicted(V5P) == pytest.approx(5e-6 + 2 * 3 * 1e-6 + one.received / 180e9)
    assert measured(1.0, "all-gather").received == 7 * (64 << 20)


def test_between_slices_the_data_centre_network_counts():
    """Two slices of four chips: one chip of each exchanges all over it, all eight a quarter of it each."""
    groups = {group.name: group for group in find_groups(pod((2, 1, 4, 1), slices=2))}
    assert {name: (one.members, one.slices) for name, one in groups.items()} == {
        "dcn": (2, 2), "fsdp": (4, 1), "all devices": (8, 2),
    }  # fmt: skip
    of_all, of_two = (measured(0.0107374, group=groups[name]) for name in ("all devices", "dcn"))
    assert of_two.received == of_two.between_slices == 64 << 20
    assert of_two.predicted(V5P) == pytest.approx(0.0107374, rel=1e-2)
    assert of_all.between_slices == 16 << 20 and of_all.predicted(V5P) == pytest.approx(0.0032, rel=0.1)
    gathers = measured(1.0, "all-gather", group=groups["all devices"])
    assert (gathers.received, gathers.between_slices) == (7 * (64 << 20), 64 << 20)
    assert of_two.predicted(chip_named("TPU v4", "tpu")) == float("inf"), "nothing is published of it"
    (found,) = judge_collectives([of_two])
    assert found.text == "2 devices of several slices: 64 MiB 10.7 ms, 25 GB/s per host" and found.outcome == "ok"
    (found,) = judge_collectives([dataclasses.replace(of_two, seconds=0.1)])
    assert found.outcome == "warning" and "by published numbers 64.00 MiB take 10.7 ms" in found.text


def test_a_collective_far_beyond_the_prediction_is_a_warning():
    good = [measured(1e-5, size=4096), measured(7e-4)]
    (found,) = judge_collectives([*good, measured(1.0, "all-gather")])
    assert found.name == "all-reduce over fsdp" and found.outcome == "ok"
    assert found.text == "8 devices of several hosts: 4 KiB 10 µs, 64 MiB 700 µs"
    (found,) = judge_collectives([good[0], measured(5e-3)])
    assert found.outcome == "warning" and "; by published numbers 64.00 MiB take 66" in found.text


def test_nothing_is_published_of_a_cpu():
    group = find_groups(make_mesh("auto", jax.devices()[:2]))[0]
    assert isinstance(group, Group)
    (found,) = judge_collectives([measured(10.0, group=group)])
    assert found.outcome == "ok" and found.text.startswith("2 devices of one host: ")
