"""All checks in order: on one process with its devices, and between threads where hosts differ."""

import concurrent.futures
import contextvars
import dataclasses
import io
import json
import sys

import jax
import pytest
from rich.console import Console

from lockstep.errors import PeerError
from lockstep.hosts import DistributedConfig, Hosts, MemoryClient
from lockstep.main.doctor import DoctorConfig, Finding, RunNeeds, examine
from lockstep.main.doctor.device_speed import Sizes
from lockstep.main.doctor.job import JoinResult
from lockstep.placement.device import calibrated, chip_of

module = sys.modules["lockstep.main.doctor.examine"]
HERE = contextvars.ContextVar("hosts")
SMALL = Sizes(dtype="float32", read=64, rows=1, product=32, read_turns=(1, 3), product_turns=(1, 3))


@pytest.fixture
def joined(monkeypatch):
    """Each thread joins the job that it was given."""
    monkeypatch.setattr(
        module,
        "join",
        lambda config: JoinResult(hosts=HERE.get(), finding=Finding.ok("job", "3 processes joined")),
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
    monkeypatch.setattr(module.device_speed, "sizes_for", lambda platform: SMALL)
    monkeypatch.setattr(module.collectives, "sizes_for", lambda platform: (256, 1024))
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

    monkeypatch.setattr(module.device_speed, "build_loops", broken)
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
