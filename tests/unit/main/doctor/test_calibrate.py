"""From seconds to the numbers of a chip: what made the seconds is found again, and plan and auto read the file."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from lockstep.engine import Engine, EngineConfig
from lockstep.main.doctor.calibrate import calibration, fit_link
from lockstep.main.doctor.collectives import CollectiveTime, find_groups
from lockstep.main.doctor.device_speed import DeviceSpeed
from lockstep.placement import make_mesh
from lockstep.placement.device import Link, calibrated, chip_named, save_calibration
from tests import tiny

SIZES = (4 << 10, 1 << 20, 64 << 20)
SPEEDS = [
    DeviceSpeed(bandwidth=2.4e12, flops=4e14),
    DeviceSpeed(bandwidth=2.2e12, flops=3.9e14),
    DeviceSpeed(bandwidth=2.3e12, flops=4.1e14),
]


@dataclasses.dataclass(frozen=True)
class Client:
    platform_version: str = "libtpu\n0.0.46.3"


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    coords: tuple[int, ...]
    device_kind: str = "TPU v5p"
    platform: str = "tpu"
    client: Client = Client()


def devices(**changed):
    return [Device(i, i // 4, (i % 2, i // 2 % 2, i // 4), **changed) for i in range(8)]


def made_by(links, chosen):
    """What would be measured with the links, inside hosts and between them."""
    grid = np.empty(8, object)
    grid[:] = chosen
    found = []
    for group in find_groups(Mesh(grid.reshape(1, 4, 2), ("dp", "fsdp", "tp"))):
        link = links[group.crosses_hosts]
        chip = dataclasses.replace(chip_named("TPU v5p", "tpu"), link=link, network=link)
        for kind in ("all-reduce", "all-gather"):
            for size in SIZES:
                one = CollectiveTime(group=group, kind=kind, size=size, seconds=0.0)
                found.append(dataclasses.replace(one, seconds=one.predicted(chip)))
    return found


def test_the_link_that_made_the_seconds_is_found():
    link = Link(bandwidth=1.5e11, latency_s=7e-6, hop_s=2e-6)
    found = fit_link(made_by({False: link, True: link}, devices()))
    assert found["bandwidth"] == pytest.approx(1.5e11)
    # The 4 KiB themselves take up to 0.2 µs.
    assert found["latency_s"] == pytest.approx(7e-6, rel=0.05) and found["hop_s"] == pytest.approx(2e-6, rel=0.05)


def test_a_tpu_has_one_link_and_plan_reads_the_file(tmp_path):
    link = Link(bandwidth=1.5e11, latency_s=7e-6, hop_s=2e-6)
    content = calibration(SPEEDS, made_by({False: link, True: link}, devices()), devices()[0], 2, 8)
    assert "network" not in content and content["chip"] == "TPU v5p"
    path = tmp_path / "new" / "v5p.json"
    save_calibration(path, **content)
    chip = calibrated(chip_named("TPU v5p", "tpu"), str(path))
    assert (chip.bandwidth, chip.flops) == (2.3e12, 4e14), "the medians of the processes"
    assert chip.network == chip.link and chip.link.bandwidth == pytest.approx(1.5e11)
    assert "by lockstep doctor on 8 of TPU v5p in 2 processes, jax " in chip.source and "libtpu 0.0.46.3" in chip.source


def test_where_hosts_have_a_network_of_their_own_it_is_apart():
    chosen = devices(device_kind="NVIDIA H100", platform="gpu")
    links = {False: Link(bandwidth=3e11, latency_s=9e-6), True: Link(bandwidth=4e10, latency_s=4e-5)}
    content = calibration(SPEEDS, made_by(links, chosen), chosen[0], 2, 8)
    assert content["link"]["bandwidth"] == pytest.approx(3e11)
    assert content["network"]["bandwidth"] == pytest.approx(4e10)
    assert content["network"]["latency_s"] == pytest.approx(4e-5, rel=0.1)


def test_without_collectives_there_are_no_links():
    content = calibration(SPEEDS[:1], [], devices()[0], 1, 1)
    assert not {"link", "network"} & set(content)


def test_the_engine_chooses_by_the_file(tmp_path):
    path = str(tmp_path / "cpu.json")
    slow = [DeviceSpeed(bandwidth=1e9, flops=1e9)]
    save_calibration(path, **calibration(slow, [], jax.devices()[0], 1, 1))
    mesh = make_mesh(devices=jax.devices()[:2])
    model = (tiny.CONFIG, tiny.placed_weights(mesh))
    published, measured = (
        Engine(EngineConfig(calibration=file, layout={"tensor": 1}), mesh).predict(model, tiny.requests())
        for file in (None, path)
    )
    assert published.estimate is not None and measured.estimate is not None
    assert measured.estimate.memory_s == pytest.approx(15 * published.estimate.memory_s)
    assert path in measured.chip and path not in published.chip
