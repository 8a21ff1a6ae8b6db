"""Bandwidth, operations and collectives: what is computed, and what is said of their seconds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.doctor import speed
from lockstep.doctor.speed import (
    CollectiveTime,
    DeviceSpeed,
    Group,
    Loop,
    Sizes,
    build_collectives,
    build_loops,
    find_groups,
    judge_collectives,
    judge_speeds,
    speeds,
    time_loops,
)
from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.placement import make_mesh
from lockstep.placement.device import chip_named, compile_program


def loops(hosts):
    mesh = make_mesh(devices=jax.devices()[:1])
    whole = NamedSharding(mesh, PartitionSpec())
    x, count = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in (((4,), "float32"), ((), "int32"))
    )

    def run(x, count):
        return jax.lax.fori_loop(0, count, lambda _, x: x + 1, x)

    fill = compile_program("fill", lambda: jnp.zeros(4), [], mesh=mesh, ledger=hosts.ledger, out_shardings=whole)
    return [
        Loop(
            name="add",
            fill=fill,
            run=compile_program("add", run, [x, count], mesh=mesh, ledger=hosts.ledger),
            turns=(2, 6),
        )
    ]


def test_every_launch_is_in_the_ledger():
    hosts = Hosts(MemoryClient.hub(1)[0])
    time_loops(hosts, "adding", lambda: loops(hosts))
    assert hosts.ledger.launches == ["fill"] + ["add"] * (1 + 2 * speed.REPEATS)


@pytest.mark.parametrize(("few", "many", "turn"), [(0.5, 0.9, 0.1), (0.9, 0.6, 0.1)], ids=["slope", "noise"])
def test_a_turn_is_the_slope_and_never_less_than_nothing(few, many, turn, monkeypatch):
    monkeypatch.setattr(speed, "_launch", lambda loop, arguments, turns: {2: few, 6: many}[turns])
    hosts = Hosts(MemoryClient.hub(1)[0])
    ((seconds,),) = time_loops(hosts, "adding", lambda: loops(hosts))
    assert np.isclose(seconds, turn)


def test_a_loop_that_does_not_compile_fails_on_all():
    def build():
        raise ValueError("no such device")

    with pytest.raises(PeerError, match="doctor/adding#1/compile failed: ValueError: no such device"):
        time_loops(Hosts(MemoryClient.hub(1)[0]), "adding", build)


SMALL = Sizes(dtype=jnp.float32, read=64, rows=1, product=32, read_turns=(1, 3), product_turns=(1, 3))
V5P = chip_named("TPU v5p", "tpu")


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    device_kind: str = "TPU v5p"
    platform: str = "tpu"


POD = [Device(index // 4) for index in range(12)]


def test_the_loops_run_on_all_devices_and_their_numbers_are_those_of_a_memory():
    hosts, devices = Hosts(MemoryClient.hub(1)[0]), jax.devices()[:2]
    loops = build_loops(hosts, devices, SMALL)
    for loop in loops:
        matrix, x = loop.fill()
        found = loop.run((matrix, x), jax.device_put(jnp.int32(5), jax.NamedSharding(x.sharding.mesh, jax.P())))
        assert found.shape == x.shape and bool((found == 1).all()), "a product of ones, divided by their number"
        assert found.sharding.device_set == set(devices)
    seconds = time_loops(hosts, "small", lambda: loops)
    (speed,) = speeds(seconds, devices, SMALL)
    assert speed.bandwidth == pytest.approx(2 * 64 * 64 * 4 / seconds[0][0]), "two devices read from one memory"
    assert speed.flops == pytest.approx(2 * 2 * 32**3 / seconds[0][1])


def test_every_device_of_a_tpu_has_its_own_memory(monkeypatch):
    monkeypatch.setattr(speed, "count_memories", len)
    (first, _) = speeds([[1e-3, 1e-2], [1e-3, 1e-2]], POD[:8], speed.sizes_for("tpu"))
    assert first == DeviceSpeed(bandwidth=16384**2 * 2 / 1e-3, flops=2 * 8192**3 / 1e-2)


@pytest.fixture
def judged(monkeypatch):
    """What is said of a pod whose hosts reach some shares of the published bandwidth."""
    monkeypatch.setattr(speed, "count_memories", len)
    return _judged


def _judged(*bandwidths):
    found = [DeviceSpeed(bandwidth=share * V5P.bandwidth, flops=0.8 * V5P.flops) for share in bandwidths]
    memory, products = judge_speeds(found, POD)
    assert products.outcome == "ok" and products.text == "367.2 TFLOP/s per device, 80% of the 459 published"
    return memory


def test_what_is_near_the_published_number_is_ok(judged):
    assert judged(0.9, 0.9, 0.88).text == "2433 GB/s per device, 88% of the 2765 published"


def test_a_slow_host_is_named(judged):
    found = judged(0.9, 0.6, 0.88)
    assert found.outcome == "warning"
    assert found.text.endswith("; the median of all hosts is 2433, and process 1 slower.")


def test_all_slow_is_a_warning(judged):
    found = judged(0.5, 0.5, 0.5)
    assert found.outcome == "warning" and "--calibrate" in found.fix


def test_processes_at_one_memory_are_not_compared(monkeypatch):
    monkeypatch.setattr(speed, "count_memories", lambda devices: 1)
    found = [DeviceSpeed(bandwidth=1e10, flops=1e11), DeviceSpeed(bandwidth=3e10, flops=3e11)]
    devices = [Device(0, "cpu", "cpu"), Device(1, "cpu", "cpu")]
    assert [each.outcome for each in judge_speeds(found, devices)] == ["ok", "ok"]


@dataclasses.dataclass(frozen=True)
class PodDevice:
    id: int
    process_index: int
    coords: tuple[int, ...]
    device_kind: str = "TPU v5p"
    platform: str = "tpu"
    slice_index: int = 0


def pod(shape, hosts=2, slices=1):
    devices = [PodDevice(i, i * hosts // 8, (i % 2, i // 2 % 2, i // 4), slice_index=i * slices // 8) for i in range(8)]
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
    (loop,) = build_collectives(Hosts(MemoryClient.hub(1)[0]), [(group, kind, 32)])
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
