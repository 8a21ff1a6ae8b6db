"""The listener of the process that runs the service; tests/multiprocess/test_liveness.py has real jobs."""

import json
import queue
import socket
import threading
import time

import pytest

from lockstep.hosts import MemoryClient, liveness


@pytest.fixture
def job(monkeypatch):
    """The clients of three processes, what the listener of the first reports, and a function that connects to it."""
    monkeypatch.setattr(liveness, "GRACE_S", 0.05)
    monkeypatch.setattr(liveness, "NEWS_S", 0.05)
    clients, lost, stopping = MemoryClient.hub(3), queue.Queue(), threading.Event()
    liveness.Listener(clients[0], lambda task, last: lost.put((task, last)), stopping).start()
    port, word = json.loads(clients[0].get(liveness.LISTENER, 10))

    def connect(hello):
        connection = socket.create_connection(("127.0.0.1", port), 10)
        connection.sendall(hello.replace("WORD", word).encode())
        return connection

    yield clients, lost, connect
    stopping.set()


def test_a_connection_that_ends_is_a_process_that_is_gone(job):
    _, lost, connect = job
    connect("WORD 2\n").close()
    assert lost.get(timeout=10) == (2, "")


def test_the_system_ends_the_connection_of_a_machine_that_no_longer_answers(job, monkeypatch):
    _, lost, connect = job
    found = []

    def noted(connection, keep_alive=liveness.keep_alive):
        keep_alive(connection)
        unacknowledged = getattr(socket, "TCP_USER_TIMEOUT", None)
        options = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            *([(socket.IPPROTO_TCP, unacknowledged)] if unacknowledged else []),
        ]
        found.append([connection.getsockopt(*option) for option in options])

    monkeypatch.setattr(liveness, "keep_alive", noted)
    connect("WORD 2\n").close()
    assert lost.get(timeout=10) == (2, "") and len(found) == 1
    assert found[0][0] and found[0][1:] in ([], [int(liveness.UNHEARD_S * 1000)])


def test_where_the_service_has_no_address_nobody_is_taken_for_gone(monkeypatch):
    monkeypatch.setattr(liveness, "CONNECT_S", 0.05)
    monkeypatch.setattr(liveness, "service_address", lambda: None)
    assert liveness.Connection(MemoryClient.hub(2)[1], threading.Event()).wait() is False


def test_a_process_whose_heart_beats_has_only_lost_its_connection(job):
    clients, lost, connect = job
    clients[1].set("lockstep/heartbeat/1", json.dumps(["decode", 0, time.time() + 3600]).encode())
    connect("WORD 1\n").close()
    connect("WORD 2\n").close()
    assert lost.get(timeout=10)[0] == 2, "the other one, lost later"


def test_it_listens_at_the_port_that_a_firewall_opens_and_elsewhere_where_that_is_taken(monkeypatch):
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv(liveness.PORT, str(port))
    with liveness._listen("", 1) as first, liveness._listen("", 1) as second:
        assert first.getsockname()[1] == port != second.getsockname()[1]


@pytest.mark.parametrize("hello", ["0123456789abcdef 1\n", "WORD 3\n", "WORD -1\n", "WORD\n", "\xff\x00", "x" * 4096])
def test_a_stranger_is_nobody(job, hello):
    _, lost, connect = job
    connect(hello).close()
    connect("WORD 2\n").close()
    assert lost.get(timeout=10) == (2, "") and lost.empty()


def test_every_process_hears_who_is_silent(job, monkeypatch):
    clients, _, connect = job
    monkeypatch.setattr("lockstep.hosts.heartbeat.SILENT_S", -1.0)
    clients[1].set("lockstep/heartbeat/1", json.dumps(["decode", 0, 1]).encode())
    with connect("WORD 2\n") as connection:
        news = connection.makefile()
        while not (names := json.loads(news.readline())):
            pass
    assert len(names) == 1 and names[0].startswith("process 1 (last phase 'decode'")


@pytest.mark.parametrize("line", [b"", b"{}", b"[1, null]", b"\xff", b"nonsense"])
def test_news_that_cannot_be_read_name_nobody(line):
    assert liveness._names(line) == ()
    assert liveness._names(b'["process 1 \\u001b[31m"]') == ("process 1 \\x1b[31m",)
