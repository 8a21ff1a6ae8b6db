"""Published numbers of chips."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from lockstep.placement.device import Link, chip_named, hops, on_one_chip, published_chip


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("TPU v4", "tpu", "TPU v4"),
        ("TPU v5", "tpu", "TPU v5p"),
        ("TPU v5 lite", "tpu", "TPU v5e"),
        ("TPU v6 lite", "tpu", "TPU v6e"),
        ("TPU7x", "tpu", "TPU7x core"),
        ("TPU8t", "tpu", "TPU 8t"),
        ("TPU8i", "tpu", "TPU 8i core"),
        ("TPU v9", "tpu", "TPU v5p"),
        ("NVIDIA H100 80GB HBM3", "gpu", "H100"),
        ("NVIDIA H200", "gpu", "H200"),
        ("cpu", "cpu", "CPU"),
    ],
)
def test_chips(kind: str, platform: str, name: str) -> None:
    assert chip_named(kind, platform).name == name


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", "H100"),
        ("NVIDIA H200", "gpu", "H200"),
        ("NVIDIA H100 PCIe", "gpu", None),
        ("NVIDIA H100 NVL", "gpu", None),
        ("NVIDIA H200 NVL", "gpu", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "gpu", None),
        ("TPU v5 lite", "tpu", "TPU v5e"),
        ("cpu", "cpu", None),
    ],
)
def test_numbers_are_published_for_the_very_device_alone(kind: str, platform: str, name: str | None) -> None:
    device: Any = SimpleNamespace(device_kind=kind, platform=platform)
    chip = published_chip(device)
    assert (None if chip is None else chip.name) == name


@pytest.mark.parametrize(
    ("coords", "expected"),
    [
        ([(0, 0, 0)], 0),
        ([(0, 0, 0), (1, 0, 0)], 1),
        ([(x, y, 0) for x in range(2) for y in range(2)], 2),  # a host of a v5p
        ([(x, y, 0) for x in range(2) for y in range(4)], 4),  # a v6e-8
        ([(2 + x, y, z) for x in range(2) for y in range(2) for z in range(2)], 3),
    ],
)
def test_hops_are_those_of_the_longest_way_through_the_group(coords: list[Any], expected: int) -> None:
    devices: list[Any] = [SimpleNamespace(coords=place) for place in coords]
    assert hops(devices) == expected


def test_the_two_devices_of_a_chip_are_near_each_other() -> None:
    core = chip_named("TPU7x", "tpu")
    assert 2 * core.bandwidth == 7.37e12 and 2 * core.memory == pytest.approx(192 * 2**30, rel=0.02)
    assert core.core is not None and core.core.bandwidth > core.link.bandwidth
    devices: list[Any] = [SimpleNamespace(coords=(x, 0, 0), core_on_chip=core) for x in range(2) for core in range(2)]
    assert on_one_chip(devices[:2]) and not on_one_chip(devices[1:3]) and not on_one_chip(devices[:1])
    assert not on_one_chip(jax.devices()[:2])
    devices[1].slice_index = 1  # the first chip of another slice
    assert not on_one_chip(devices[:2])


@pytest.mark.parametrize(
    ("kind", "devices", "memory", "bandwidth", "flops"),
    [("TPU8t", 1, 231e9, 6.4e12, 0.996e15), ("TPU8i", 2, 309e9, 8.6e12, 1.10e15)],
)
def test_chips_of_the_eighth_generation_have_the_numbers_of_jax(kind, devices, memory, bandwidth, flops) -> None:
    """Per chip, which is one device or two; a link carries twice what one of TPU7x does."""
    chip = chip_named(kind, "tpu")
    found = [devices * each for each in (chip.memory, chip.bandwidth, chip.flops)]
    assert found == pytest.approx([memory, bandwidth, flops], rel=1e-3)
    assert chip.link.bandwidth == 2 * chip_named("TPU7x", "tpu").link.bandwidth and chip.core is None


def test_devices_without_a_place_are_a_line() -> None:
    assert hops(jax.devices()[:4]) == 3


def test_a_sum_goes_there_and_back() -> None:
    link = Link(bandwidth=1.0, latency_s=5.0, hop_s=1.0)
    assert (link.gather_s(3), link.reduce_s(3)) == (8.0, 11.0)
    # The one published measurement, see the comment at the TPUs' numbers.
    assert chip_named("TPU v5e", "tpu").link.gather_s(3) == pytest.approx(8e-6)


def test_a_plan_can_say_whose_numbers_it_has():
    for kind, platform in (("TPU v5p", "tpu"), ("TPU v6e", "tpu"), ("TPU8t", "tpu"), ("NVIDIA H100", "gpu")):
        assert chip_named(kind, platform).source.startswith("published: ")
