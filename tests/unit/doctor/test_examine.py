"""All checks in order: on one process with its devices, and between threads where hosts differ."""

import concurrent.futures
import contextvars
import dataclasses
import io
import json
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from rich.console import Console

from lockstep.doctor import DoctorConfig, examine
from lockstep.doctor.examine import calibration, fit_link
from lockstep.doctor.finding import Finding
from lockstep.doctor.job import JoinResult
from lockstep.doctor.needs import RunNeeds
from lockstep.doctor.speed import CollectiveTime, DeviceSpeed, Sizes, find_groups
from lockstep.engine import Engine, EngineConfig
from lockstep.errors import PeerError
from lockstep.hosts import DistributedConfig, Hosts, MemoryClient
from lockstep.placement import make_mesh
from lockstep.placement.device import Link, calibrated, chip_named, chip_of, save_calibration
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
    slice_index: int = 0


def devices(**changed):
    return [Device(i, i // 4, (i % 2, i // 2 % 2, i // 4), **changed) for i in range(8)]


def made_by(links, chosen, dcn=None):
    """What would be measured with the links, inside hosts and between them."""
    grid = np.empty(8, object)
    grid[:] = chosen
    found = []
    for group in find_groups(Mesh(grid.reshape(1, 4, 2), ("dp", "fsdp", "tp"))):
        link = links[group.crosses_hosts]
        chip = dataclasses.replace(chip_named("TPU v5p", "tpu"), link=link, network=link, dcn=dcn)
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


def test_a_bandwidth_hidden_by_noise_is_that_of_the_whole_time():
    link = Link(bandwidth=1.5e11, latency_s=7e-6, hop_s=2e-6)
    noisy = [dataclasses.replace(one, seconds=1e-3) for one in made_by({False: link, True: link}, devices())]
    least = min(one.received for one in noisy if one.kind == "all-gather" and one.size == max(SIZES))
    assert fit_link(noisy)["bandwidth"] == least / 1e-3


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


def test_what_slices_exchange_tells_their_network_and_not_the_link(tmp_path):
    link = Link(bandwidth=1.5e11, latency_s=7e-6, hop_s=2e-6)
    two = [dataclasses.replace(device, slice_index=device.process_index) for device in devices()]
    save_calibration(
        path := tmp_path / "v5p.json", **calibration(SPEEDS, made_by({False: link, True: link}, two, 4e9), two[0], 2, 8)
    )
    chip = calibrated(chip_named("TPU v5p", "tpu"), str(path))
    assert chip.dcn == pytest.approx(4e9, rel=0.01) and chip.link.bandwidth == pytest.approx(1.5e11)


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


module = sys.modules["lockstep.doctor.examine"]
HERE = contextvars.ContextVar("hosts")
SMALL = Sizes(dtype="float32", read=64, rows=1, product=32, read_turns=(1, 3), product_turns=(1, 3))


@pytest.fixture
def joined(monkeypatch):
    """Each thread joins the job that it was given."""
    monkeypatch.setattr(
        module, "join", lambda config: JoinResult(hosts=HERE.get(), finding=Finding.ok("job", "3 processes joined"))
    )


def on_threads(count, config, needs=lambda index: RunNeeds()):
    """Run doctor between threads; the exit codes, and what each of them showed."""

    def one(hosts):
        HERE.set(hosts)
        out = io.StringIO()
        return examine(config, needs(hosts.index), DistributedConfig(), Console(file=out)), out.getvalue()

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        hosts = [Hosts(client, 60.0) for client in MemoryClient.hub(count)]
        return [future.result() for future in [pool.submit(one, each) for each in hosts]]


def test_the_leader_alone_shows_what_all_found(joined, tmp_path):
    config = DoctorConfig(measure=False, json=str(tmp_path / "report.json"))
    (first, *others) = on_threads(3, config)
    assert first[0] == 0 and others == [(0, "")] * 2
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["complete"] and set(kept["sections"]) == {"machine", "job"}
    assert len(kept["facts"]) == len(kept["coordination"]) == 3
    names = [line.split(":")[0].split(maxsplit=1)[1] for line in first[1].splitlines()[:-1]]
    assert names == [
        *("versions", "host", "disk", "variables", "job", "devices", "device memory", "mesh", "hosts", "clocks"),
        "coordination",
    ]


def test_a_host_with_another_configuration_is_named_and_all_end_with_1(joined):
    results = on_threads(3, DoctorConfig(measure=False), lambda index: RunNeeds(config_digest=f"{index == 1}"))
    assert [code for code, _ in results] == [1, 1, 1]
    assert "fix      hosts: configuration: processes 0, 2 (the majority): 'False'; process 1: 'True'." in results[0][1]


def test_a_directory_that_one_host_cannot_write_to_is_named(joined, tmp_path):
    (tmp_path / "file").write_text("")
    paths = {0: tmp_path, 1: tmp_path / "file" / "below", 2: tmp_path}
    results = on_threads(3, DoctorConfig(measure=False), lambda index: RunNeeds(written=(str(paths[index]),)))
    assert [code for code, _ in results] == [1, 1, 1]
    assert f"fix      bucket {paths[1]} (process 1): writing to it failed: " in results[0][1]


def test_a_report_that_cannot_be_written_is_known_to_all(joined, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PeerError, match=r"process 0: ConfigError: json is .*report\.json, which cannot be written"):
        on_threads(2, DoctorConfig(measure=False, json=str(tmp_path / "file" / "report.json")))


def test_one_process_measures_its_devices_and_writes_them(joined, monkeypatch, tmp_path):
    monkeypatch.setattr(module.speed, "sizes_for", lambda platform: SMALL)
    monkeypatch.setattr(module.speed, "collective_sizes", lambda platform: (256, 1024))
    hosts, out, path = Hosts(MemoryClient.hub(1)[0]), io.StringIO(), tmp_path / "cpu.json"
    HERE.set(hosts)
    config = DoctorConfig(calibrate=str(path), json=str(tmp_path / "report.json"))
    needs = RunNeeds(mesh_shape=f"1,{jax.device_count()},1")
    assert examine(config, needs, DistributedConfig(), Console(file=out)) == 0
    kept = json.loads((tmp_path / "report.json").read_text())
    names = [each["name"] for each in kept["sections"]["speed"]]
    assert names == ["memory bandwidth", "matrix products", "all-reduce over fsdp", "calibration"]
    assert {(one["kind"], one["bytes"]) for one in kept["collectives"]} == {
        (kind, size) for kind in ("all-reduce", "all-gather") for size in (256, 1024)
    }
    chip = calibrated(chip_of(jax.devices()[0]), str(path))
    assert chip.bandwidth == pytest.approx(kept["speeds"][0]["bandwidth"]) and chip.source.startswith("measured 20")


def test_what_fails_on_all_is_a_finding_and_the_report_goes_on(joined, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(module.speed, "build_loops", broken)
    HERE.set(Hosts(MemoryClient.hub(1)[0]))
    out = io.StringIO()
    assert examine(DoctorConfig(), RunNeeds(), DistributedConfig(), Console(file=out)) == 1
    assert (
        "fix      speed: PeerError: doctor/device speed#1/compile failed: RuntimeError: no such instr" in out.getvalue()
    )
    assert out.getvalue().splitlines()[-1].endswith(" s")


def test_without_a_job_this_process_says_what_it_knows(monkeypatch, tmp_path):
    found = Finding.to_fix("job", "not all processes were there within 1 s.")
    ended = []
    monkeypatch.setattr(module, "join", lambda config: JoinResult(hosts=None, finding=found, waiting=True))
    monkeypatch.setattr(module, "end_process", ended.append)
    out = io.StringIO()
    config = DoctorConfig(json=str(tmp_path / "report.json"))
    needs = dataclasses.replace(RunNeeds(), written=(str(tmp_path),))
    assert examine(config, needs, DistributedConfig(), Console(file=out)) == 1
    assert ended == [1]
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("ok       versions: ") and lines[4] == f"fix      job: {found.text}"
    assert lines[5] == f"ok       bucket {tmp_path}: written, read and deleted"
