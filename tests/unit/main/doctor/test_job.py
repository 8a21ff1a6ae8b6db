"""Not joining the job is a finding: an error, and processes that never come."""

import socket
import threading

from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig, Hosts, MemoryClient
from lockstep.main.doctor import job


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
