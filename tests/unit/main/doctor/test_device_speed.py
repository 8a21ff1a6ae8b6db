"""Bandwidth and operations: what is computed from seconds, and what is said of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.doctor import device_speed
from lockstep.main.doctor.device_speed import DeviceSpeed, Loop, Sizes, build_loops, judge_speeds, speeds, time_loops
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
    assert hosts.ledger.launches == ["fill"] + ["add"] * (1 + 2 * device_speed.REPEATS)


@pytest.mark.parametrize(("few", "many", "turn"), [(0.5, 0.9, 0.1), (0.9, 0.6, 0.1)], ids=["slope", "noise"])
def test_a_turn_is_the_slope_and_never_less_than_nothing(few, many, turn, monkeypatch):
    monkeypatch.setattr(device_speed, "_launch", lambda loop, arguments, turns: {2: few, 6: many}[turns])
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
    monkeypatch.setattr(device_speed, "count_memories", len)
    (first, _) = speeds([[1e-3, 1e-2], [1e-3, 1e-2]], POD[:8], device_speed.sizes_for("tpu"))
    assert first == DeviceSpeed(bandwidth=16384**2 * 2 / 1e-3, flops=2 * 8192**3 / 1e-2)


@pytest.fixture
def judged(monkeypatch):
    """What is said of a pod whose hosts reach some shares of the published bandwidth."""
    monkeypatch.setattr(device_speed, "count_memories", len)
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
    monkeypatch.setattr(device_speed, "count_memories", lambda devices: 1)
    found = [DeviceSpeed(bandwidth=1e10, flops=1e11), DeviceSpeed(bandwidth=3e10, flops=3e11)]
    devices = [Device(0, "cpu", "cpu"), Device(1, "cpu", "cpu")]
    assert [each.outcome for each in judge_speeds(found, devices)] == ["ok", "ok"]
