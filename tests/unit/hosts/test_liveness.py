"""The listener of the process that runs the service; tests/multiprocess/test_liveness.py has real jobs."""

import json
import queue
import socket
import ssl
import threading
import time

import pytest
from jax._src.lib import _jax

from lockstep import launch
from lockstep.hosts import MemoryClient, liveness
from tests.certificates import make_authority


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
    assert liveness.Connection(MemoryClient.hub(2)[1], threading.Event()).wait() == ""


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
    clients[2].set("lockstep/heartbeat/2", json.dumps(["decode", 0, None]).encode())
    with connect("WORD 2\n") as connection:
        news = connection.makefile()
        while not (names := json.loads(news.readline())):
            pass
    assert len(names) == 2 and names[0].startswith("process 1 (last phase 'decode'")
    assert names[1] == "process 0 (never heard of)"


def test_the_service_answers_a_stranger():
    address = f"127.0.0.1:{launch.free_port()}"
    service = _jax.get_distributed_runtime_service(address, 1)
    assert liveness.service_answers(address, 60)
    service.shutdown()


def test_a_service_with_tls_closes_the_connection_of_a_stranger(tmp_path):
    make_authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "ca.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with server.accept()[0] as connection, pytest.raises(ssl.SSLError):
                context.wrap_socket(connection, server_side=True)

        threading.Thread(target=serve).start()
        assert liveness.service_answers(f"127.0.0.1:{server.getsockname()[1]}", 60)


def test_a_stopped_process_takes_connections_and_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        assert not liveness.service_answers(address, 0.1)
    with pytest.raises(ConnectionRefusedError):
        liveness.service_answers(address, 60)


def test_only_two_questions_in_a_row_without_an_answer_are_a_stopped_process(monkeypatch):
    """After all processes were stopped and go on (Ctrl-Z and fg), the first question is late, the second is not."""
    connection = liveness.Connection(MemoryClient.hub(2)[1], threading.Event())
    connection._heard -= 3600
    answers = [False, True]
    monkeypatch.setattr(liveness, "service_answers", lambda *_: answers.pop(0))
    connection._raise_if_stopped()
    answers[:] = [False, False]
    connection._heard -= 3600
    with pytest.raises(liveness._StoppedError):
        connection._raise_if_stopped()


@pytest.mark.parametrize("line", [b"", b"{}", b"[1, null]", b"\xff", b"nonsense"])
def test_news_that_cannot_be_read_name_nobody(line):
    assert liveness._names(line) == ()
    assert liveness._names(b'["process 1 \\u001b[31m"]') == ("process 1 \\x1b[31m",)


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def service(request):
    """A port that listens, by the family of its socket."""
    with socket.socket(request.param) as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener


@pytest.mark.skipif(not liveness.Path(liveness.PROC, "tcp").exists(), reason="connections are in /proc on Linux only")
def test_hosts_without_a_connection_are_named(service, monkeypatch):
    port = service.getsockname()[1]
    assert liveness.missing(port, 3) == "0 of 3 processes have connected"
    addresses = {"pod-0": {"127.0.0.1"}, "pod-1": {"10.9.9.9"}}
    monkeypatch.setattr(liveness, "_addresses", lambda name: addresses.get(name, set()))
    with socket.create_connection(("127.0.0.1", port)):
        assert liveness.missing(port, 3) == "1 of 3 processes have connected, from 127.0.0.1"
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "pod-0,pod-1,pod-2")
        text = "1 of 3 processes have connected; worker 1 (pod-1), worker 2 (pod-2) have not"
        assert liveness.missing(port, 3) == text
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "pod-0,pod-1")
        assert liveness.missing(port, None) == "1 processes have connected; worker 1 (pod-1) has not"


def test_a_name_that_is_not_known_yet_is_of_a_missing_host():
    assert liveness._addresses("no-such-host.invalid") == set() and "127.0.0.1" in liveness._addresses("localhost")


def test_lines_come_until_all_are_there(monkeypatch, capsys):
    """Only from the process that can know: 256 lines a minute would say no more."""
    said = threading.Semaphore(0)

    def missing(port, count):
        said.release()
        return f"port {port} of {count}"

    monkeypatch.setattr(liveness, "missing", missing)
    monkeypatch.setattr(liveness, "SAY_S", 0.01)
    with liveness.say_who_is_missing("host:8476", 4, 1800.0):
        assert all(said.acquire(timeout=60) for _ in range(2))
    assert "lockstep: waited 0 of 1800 s for the start: port 8476 of 4\n" in capsys.readouterr().err
    before = threading.active_count()
    with liveness.say_who_is_missing(None, 4, 1800.0):
        assert threading.active_count() <= before
