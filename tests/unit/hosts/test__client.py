"""The in-memory client keeps the promises of the interface."""

import socket
import threading
from types import SimpleNamespace

import jax
import pytest

from lockstep.errors import HostError
from lockstep.hosts import JaxClient, MemoryClient, _client, on_one_machine
from lockstep.hosts._client import bind_address
from tests.clock import until


def test_directories_end_at_a_slash():
    client, other = MemoryClient.hub(2)
    for key in ("a", "a/b", "a/b/c", "ab", "a#1/b"):
        client.set(key, key.encode())
    assert other.get_dir("a") == other.get_dir("a/") == {"a/b": b"a/b", "a/b/c": b"a/b/c"}
    other.delete("a")
    assert sorted(client.get_dir("a")) == [] and client.get("ab", 0) == b"ab" and client.get("a#1/b", 0) == b"a#1/b"
    other.delete("never was")


def test_set_overwrites_and_get_waits():
    client, other = MemoryClient.hub(2)
    threading.Timer(0.05, lambda: other.set("late", b"1")).start()
    assert client.get("late", 60.0) == b"1"
    other.set("late", b"2")
    assert client.get("late", 0) == b"2"
    with pytest.raises(TimeoutError, match="'never' within 0.01 s"):
        client.get("never", 0.01)


def test_a_barrier_that_timed_out_is_broken_for_all():
    client, other = MemoryClient.hub(2)
    with pytest.raises(TimeoutError, match="1 of 2 arrived"):
        client.barrier("x", 0.01)
    with pytest.raises(TimeoutError, match="1 of 2 arrived"):  # at once
        other.barrier("x", 3600.0)


def test_the_time_out_of_one_wakes_those_that_would_wait_longer():
    patient, client, _ = MemoryClient.hub(3)
    ended = []

    def wait():
        with pytest.raises(TimeoutError, match="without tasks") as error:
            patient.barrier("x", 3600.0)
        ended.append(str(error.value))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    with pytest.raises(TimeoutError, match="without tasks") as error:
        client.barrier("x", 0.05)
    thread.join(60.0)
    assert ended == [str(error.value)]


def test_no_service_no_client():
    with pytest.raises(HostError, match=r"call lockstep.hosts.start\(\) first"):
        JaxClient()


def test_a_key_that_cannot_be_looked_up_is_no_missing_key(monkeypatch):
    answers = {"there": b"1", "missing": "NOT_FOUND: no key", "lost": "INTERNAL: the log is full"}

    def look_up(key):
        if isinstance(answers[key], str):
            raise jax.errors.JaxRuntimeError(answers[key])
        return answers[key]

    service = SimpleNamespace(key_value_try_get_bytes=look_up)
    monkeypatch.setattr(_client, "global_state", SimpleNamespace(client=service, process_id=0, num_processes=2))
    client = JaxClient()
    assert client.peek("there") == b"1" and client.peek("missing") is None
    with pytest.raises(HostError, match="failed at 'lost'.* The service says: INTERNAL: the log is full"):
        client.peek("lost")


def test_closing_waits_for_the_calls_of_other_threads_and_refuses_new_ones(monkeypatch):
    asked, got = threading.Event(), []

    def get(key, milliseconds):
        asked.set()
        until(lambda: client._closed)  # the service answers after the client has begun to close
        return b"1"

    service = SimpleNamespace(blocking_key_value_get_bytes=get)
    monkeypatch.setattr(_client, "global_state", SimpleNamespace(client=service, process_id=0, num_processes=2))
    client = JaxClient()
    asking = threading.Thread(target=lambda: got.append(client.get("x", 60)))
    asking.start()
    assert asked.wait(60)
    client.close(60.0)
    assert not client._inside
    asking.join(60)
    with pytest.raises(HostError, match="'y' after this process had left the job"):
        client.get("y", 60)
    assert got == [b"1"]


@pytest.mark.parametrize(
    ("address", "count", "one"),
    [
        (None, 1, True),
        ("127.0.0.1:1234", 2, True),
        ("localhost:1234", 2, True),
        ("[::1]:1234", 2, True),
        ("10.0.0.2:1234", 1, True),
        ("10.0.0.2:1234", 2, False),
        ("pod-worker-0:1234", 2, False),
    ],
)
def test_processes_that_meet_at_a_loopback_address_are_on_one_machine(
    address: str | None, count: int, one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(client=address and object(), coordinator_address=address, num_processes=count)
    monkeypatch.setattr(_client, "global_state", state)
    assert on_one_machine() == one


@pytest.mark.parametrize(
    ("address", "found", "bound"),
    [
        ("127.0.0.1:1234", None, "127.0.0.1:1234"),
        ("localhost:1234", None, "127.0.0.1:1234"),
        ("[::1]:1234", None, "[::1]:1234"),
        ("here:1234", ["127.0.0.3"], None),  # of /etc/hosts: the others know this host by another address
        ("here:1234", ["10.0.0.2", "10.1.0.2"], None),
        ("here:1234", ["192.0.2.1"], None),  # not of an interface of this machine: behind NAT
        ("nowhere:1234", [], None),
        ("here:1234", ["0.0.0.0"], "0.0.0.0:1234"),  # stands for an interface's own address
    ],
)
def test_the_service_listens_where_the_others_look_for_it(address, found, bound, monkeypatch):
    def resolve(host, *_, **__):
        if not found:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]

    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert bind_address(address) == bound
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "[::]:1234")
    assert bind_address(address) is None
