"""Not joining the job is a finding: an error, and processes that never come."""

import dataclasses
import socket
import threading
from typing import Any

import jax
import pytest

from lockstep.doctor import job
from lockstep.doctor.job import check_devices, check_memory, check_mesh, judge_coordination, measure_coordination
from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig, Hosts, MemoryClient
from tests.multiprocess.harness import run_threads


def test_a_process_that_joined_has_its_hosts(monkeypatch):
    seen = []
    one = Hosts(MemoryClient.hub(2)[1])
    monkeypatch.setattr(job, "start", lambda config: seen.append(config) or one)
    joined = job.join(DistributedConfig())
    assert joined.hosts is one and joined.finding.text == "2 processes have joined"
    assert seen[0].initialization_timeout_s > 1000, "start() must not end the process before doctor reports"


def test_an_error_is_the_finding(monkeypatch):
    def start(config):
        raise ConfigError("this job has 1 process(es), but REQUIRE_JAX_PROCESS_COUNT requires 8.")

    monkeypatch.setattr(job, "start", start)
    joined = job.join(DistributedConfig())
    assert joined.hosts is None and not joined.waiting
    assert joined.finding.outcome == "fix" and "requires 8" in joined.finding.text

    def broken(config):
        raise RuntimeError("Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed")

    monkeypatch.setattr(job, "start", broken)
    joined = job.join(DistributedConfig())
    assert "RuntimeError: Unable to initialize" in joined.finding.text and "libtpu" in joined.finding.fix


def test_processes_that_never_come_are_the_finding(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(job, "start", lambda config: released.wait(600))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("LOCKSTEP_COORDINATOR_ADDRESS", address)
        joined = job.join(DistributedConfig(initialization_timeout_s=1))
    assert joined.waiting and joined.hosts is None
    assert joined.finding.text.endswith(f"were there within 1 s; the coordinator {address} answers.")
    assert "does not answer" in job.probe(address)
    released.set()


def test_every_process_measures_and_no_key_is_left():
    def body(hosts):
        found = measure_coordination(hosts)
        hosts.barrier("end")
        hosts.barrier("the leader has deleted the keys of earlier calls")
        return found, len(hosts.client.get_dir("lockstep/job"))

    results = run_threads(body, 3)
    assert len(results) == 3 and all(found["barrier_s"] > 0 and found["exchange_s"] > 0 for found, _ in results)
    assert [left for _, left in results] == [0, 0, 0]


def test_the_slowest_process_counts():
    quick, slow = {"barrier_s": 0.001, "exchange_s": 0.002}, {"barrier_s": 0.08, "exchange_s": 0.1}
    assert judge_coordination([quick, quick]).text == "a barrier takes 1 ms, an exchange 2 ms (median of 20)"
    found = judge_coordination([quick, slow])
    assert found.outcome == "warning" and found.text.startswith("a barrier takes 80 ms")
    assert judge_coordination([slow]).outcome == "ok", "one process waits for nobody"


@dataclasses.dataclass
class Device:
    device_kind: str = "TPU v5p"
    process_index: int = 0
    platform: str = "tpu"
    slice_index: int | None = None
    stats: Any = None

    def memory_stats(self) -> Any:
        return self.stats


def test_what_is_here_is_ok():
    (found,) = check_devices()
    assert found.text == f"{jax.device_count()} of cpu, {jax.device_count()} in each process"
    assert check_memory().text == "that of the host, which CPU devices share"


@pytest.mark.parametrize(
    ("devices", "outcome", "text"),
    [
        ([Device(), Device(process_index=1)], "ok", "2 of TPU v5p, 1 in each process"),
        ([Device(), Device(device_kind="TPU v4")], "fix", "the devices are of 2 kinds: 1 of TPU v5p, 1 of TPU v4."),
        (
            [Device(), Device(), Device(process_index=1)],
            "fix",
            "different numbers of devices (process 0: 2, process 1: 1)",
        ),
        ([Device(slice_index=0), Device(slice_index=1)], "ok", "2 of TPU v5p, 2 in each process, in 2 slices"),
        ([Device(device_kind="TPU v9")], "warning", "those of TPU v5p stand in"),
    ],
    ids=["same", "kinds", "counts", "slices", "unknown"],
)
def test_devices_that_do_not_go_together_are_found(devices, outcome, text):
    (found,) = check_devices(devices)
    assert found.outcome == outcome and text in found.text


@pytest.mark.parametrize(
    ("stats", "outcome", "text"),
    [
        ({"bytes_limit": 95 << 30, "bytes_in_use": 1 << 20}, "ok", "95.00 GiB per device, 1.00 MiB in use"),
        ({"bytes_limit": 95 << 30, "bytes_in_use": 9 << 30}, "warning", "9.00 GiB in use before anything was done."),
        ({"bytes_limit": 40 << 30, "bytes_in_use": 0}, "warning", "40.00 GiB per device, 0 B in use; a TPU v5p has"),
        ({}, "fix", "a device does not report its memory"),
    ],
    ids=["free", "used", "small", "silent"],
)
def test_memory_is_judged_by_the_worst_device(stats, outcome, text):
    found = check_memory([Device(stats={"bytes_limit": 96 << 30, "bytes_in_use": 0}), Device(stats=stats)])
    assert found.outcome == outcome and text in found.text


def test_the_mesh_of_a_run():
    assert check_mesh("1,2,2", jax.devices()[:4]).text == (
        "mesh_shape 1,2,2: dp 1, fsdp 2, tp 2; layouts for decoding: training, tensor 1, 2, 4"
    )
    staged = check_mesh("pp=2,fsdp=-1", jax.devices()[:4]).text
    assert staged.endswith("pp 2, dp 1, fsdp 2, tp 1; layouts for decoding: tensor 1, 2, 4")
    found = check_mesh("3,-1,1", jax.devices()[:4])
    assert found.outcome == "fix" and "there are 4 devices" in found.text
