"""Who has not connected yet, by real connections of this machine."""

import socket
import threading

import pytest

from lockstep.hosts import waiting


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def service(request):
    """A port that listens, by the family of its socket."""
    with socket.socket(request.param) as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener


@pytest.mark.skipif(not waiting.Path(waiting.PROC, "tcp").exists(), reason="connections are in /proc on Linux only")
def test_hosts_without_a_connection_are_named(service, monkeypatch):
    port = service.getsockname()[1]
    assert waiting.missing(port, 3) == "0 of 3 processes have connected"
    addresses = {"pod-0": {"127.0.0.1"}, "pod-1": {"10.9.9.9"}}
    monkeypatch.setattr(waiting, "_addresses", lambda name: addresses.get(name, set()))
    with socket.create_connection(("127.0.0.1", port)):
        assert waiting.missing(port, 3) == "1 of 3 processes have connected, from 127.0.0.1"
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "pod-0,pod-1,pod-2")
        text = "1 of 3 processes have connected; worker 1 (pod-1), worker 2 (pod-2) have not"
        assert waiting.missing(port, 3) == text
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "pod-0,pod-1")
        assert waiting.missing(port, None) == "1 processes have connected; worker 1 (pod-1) has not"


def test_a_name_that_is_not_known_yet_is_of_a_missing_host():
    assert waiting._addresses("no-such-host.invalid") == set() and "127.0.0.1" in waiting._addresses("localhost")


def test_lines_come_until_all_are_there(monkeypatch, capsys):
    """Only from the process that can know: 256 lines a minute would say no more."""
    said = threading.Semaphore(0)

    def missing(port, count):
        said.release()
        return f"port {port} of {count}"

    monkeypatch.setattr(waiting, "missing", missing)
    monkeypatch.setattr(waiting, "SAY_S", 0.01)
    with waiting.say_who_is_missing("host:8476", 4, 1800.0):
        assert all(said.acquire(timeout=60) for _ in range(2))
    assert "lockstep: waited 0 of 1800 s for the start: port 8476 of 4\n" in capsys.readouterr().err
    before = threading.active_count()
    with waiting.say_who_is_missing(None, 4, 1800.0):
        assert threading.active_count() <= before
