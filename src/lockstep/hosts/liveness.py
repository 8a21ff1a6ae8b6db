"""Connections between the process that runs the coordination service and each other one, which end with a process.

JAX notices a process that is gone by its own heartbeats, after ``heartbeat_timeout_s``, and then aborts all others. The
operating system closes a dead process's connections at once, and those of a machine without power after `UNHEARD_S`.
A process that is stopped (SIGSTOP) keeps them: where it is the one with the service, the others ask the service's port,
which threads of C++ answer whatever Python does. In another one nothing answers but its Python, which may stand still
in a healthy process: after `UNHEARD_S` it is named, so that its name stands above JAX's stacks, and JAX's heartbeats
decide. (JAX's client has a callback for missed ones, but jaxlib 0.11 cannot call a function of Python there: it ends
the process by ``std::bad_cast``.)
"""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.errors import HostError
from lockstep.hosts._client import Client, bind_address, service_address
from lockstep.hosts.config import environment_integer
from lockstep.hosts.heartbeat import SILENT_S, SilentProcesses, heartbeats
from lockstep.printable import print_to_stderr, printable

LISTENER = "lockstep/liveness"  # key with the port of the listener and the word that a process of this job says there
PORT = "LOCKSTEP_LIVENESS_PORT"
"""The variable with the listener's port, for a firewall that opens few; without it any port is taken."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
UNHEARD_S = 30.0  # seconds after which the system ends a connection whose other machine does not answer, by `KEEPALIVE`
NEWS_S = 5.0  # seconds between two lists of the processes that give no sign of life
QUIET_S = 2 * NEWS_S  # seconds without such a list after which the service is asked for an answer
ANSWER_S = 5.0  # seconds in which the service answers a new connection
DIED = "has died, and with it the coordination service"
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of a client of gRPC, which the service answers, or closes the connection where it expects TLS."""
CONNECT_S = 10.0  # seconds that connecting may take
AGAIN_S = 0.1  # seconds before connecting again to a listener that has closed the connection
GRACE_S = 2.0  # seconds in which a process whose connection has ended may connect again, or announce that it ends
HELLO_BYTES = 128
NEWS_BYTES = 1 << 16
SHOWN = 16  # processes that are named when several give no sign of life
STRANGERS = 16  # connections that may be open and have not said the word


class Listener:
    """The connections of the others, in the process that runs the service.

    Args:
        on_lost: Called in the listener's thread with the task of a process that is gone, and a text that says how.
    """

    def __init__(self, client: Client, on_lost: Callable[[int, str], None], stopping: threading.Event):
        self._client = client
        self._on_lost = on_lost
        self._stopping = stopping
        self._word = secrets.token_hex(16).encode()
        self._tasks: dict[socket.socket, int | None] = {}  # None: it has not said the word
        self._lost: dict[int, float] = {}  # task -> when it was lost
        self._told = 0.0
        self._silent = SilentProcesses()
        self._selector = selectors.DefaultSelector()

    def start(self) -> None:
        """Listen where the service does, tell the others, and watch in a thread that ends with the process."""
        address = bind_address(service_address() or "") or ":0"
        host = address.rpartition(":")[0].strip("[]")
        listening = _listen(host, self._client.count)
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._client.set(LISTENER, json.dumps([listening.getsockname()[1], self._word.decode()]).encode())
        threading.Thread(target=self._run, args=(listening,), name="lockstep-liveness", daemon=True).start()

    def missing(self) -> str:
        """Return the processes that give no sign of life, as text for an error; empty where there is none.

        Nothing is asked of the service: JAX holds its locks while it aborts the process.
        """
        return ", ".join(self._silent.names)

    def _run(self, listening: socket.socket) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(timeout=GRACE_S / 2):
                if key.fileobj is listening:
                    self._accept(listening)
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
            try:
                self._judge()
                if time.monotonic() - self._told >= NEWS_S:
                    self._told = time.monotonic()
                    self._tell()
            except (HostError, TimeoutError):
                return  # the service was ended in order

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            if sum(task is None for task in self._tasks.values()) >= STRANGERS:
                connection.close()
                return
            connection.setblocking(False)
            keep_alive(connection)
            self._tasks[connection] = None
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            message = connection.recv(HELLO_BYTES)
        except OSError:
            message = b""
        task = self._tasks[connection]
        if message and task is None:
            word, _, number = message.strip().partition(b" ")
            if hmac.compare_digest(word, self._word) and number.isdigit() and int(number) < self._client.count:
                self._tasks[connection] = int(number)
                self._lost.pop(int(number), None)
                return
        elif message:
            return
        self._selector.unregister(connection)
        del self._tasks[connection]
        connection.close()
        if task is not None and task not in self._tasks.values():
            self._lost[task] = time.monotonic()

    def _judge(self) -> None:
        """Report processes that came back neither to the listener nor to the service within `GRACE_S`."""
        for task, since in list(self._lost.items()):
            if time.monotonic() - since < GRACE_S or self._stopping.is_set():
                continue
            process = self._client.processes[task]
            last = heartbeats(self._client, [process]).get(process)
            if last is not None and not last.silent:
                continue  # it lives: something between the two has cut the connection
            del self._lost[task]
            self._on_lost(task, "" if last is None else str(last))

    def _tell(self) -> None:
        """Send every process the others that give no sign of life, for the moment when JAX aborts it."""
        peers = heartbeats(self._client)
        silent = [f"process {i} ({peer})" for i, peer in sorted(peers.items()) if peer.silent]
        silent += [f"process {i} (never heard of)" for i in range(self._client.count) if peers and i not in peers]
        self._silent.hear(silent[:SHOWN], UNHEARD_S)
        news = (json.dumps(self._silent.names) + "\n").encode()
        for connection, task in self._tasks.items():
            if task is not None:
                with contextlib.suppress(OSError):
                    connection.send(news)


class Connection:
    """The connection of another process to the one that runs the service."""

    def __init__(self, client: Client, stopping: threading.Event):
        self._client = client
        self._stopping = stopping
        self._heard = time.monotonic()  # when the other process gave its last sign of life
        self._has_news = False  # it has told which processes are silent
        self._silent = SilentProcesses()

    def missing(self) -> str:
        """Return the processes that give no sign of life, as text for an error; empty where none is known."""
        runner = f"process {self._client.processes[0]}, which runs the coordination service"
        try:
            if not service_answers(service_address(), SILENT_S):
                return f"{runner} ({self._unanswered()})"
        except ConnectionRefusedError:
            return ", ".join([*self.unheard(), runner])
        return ", ".join(self._silent.names)

    def unheard(self) -> list[str]:
        """The processes that were silent for `UNHEARD_S`, as text: JAX ends the one with the service because of them.

        That one may be gone before JAX, or a collective, gives up here.
        """
        return self._silent.unheard

    def wait(self) -> str:
        """Wait for the end of the process that runs the service.

        Returns:
            How it ended, as what follows its name. Empty: it cannot be reached from here, which does not mean that.
        """
        try:
            return self._wait()
        except _StoppedError:
            return f"does not answer ({self._unanswered()}; stopped, or its machine stands still)"

    def _wait(self) -> str:
        host = (service_address() or "").rpartition(":")[0].strip("[]")
        try:
            port, word = json.loads(self._client.get(LISTENER, CONNECT_S))
            hello = f"{word} {self._client.task}\n".encode()
            while self._stay((host, int(port)), hello) and not self._stopping.wait(AGAIN_S):
                pass
        except (OSError, ValueError, TypeError, OverflowError, RecursionError, HostError):
            pass
        # The listener is closed, or a firewall lets nobody there: the service's own port decides. The service closes a
        # connection on which nothing is sent now and then.
        address = _address(service_address())
        try:
            while address is not None and self._stay(address, b"") and not self._stopping.is_set():
                pass
        except ConnectionRefusedError:
            return DIED
        except OSError:
            return DIED if self._has_news else ""
        return ""

    def _stay(self, address: tuple[str, int], hello: bytes) -> bool:
        """Connect, and return True when the other side has closed the connection."""
        with socket.create_connection(address, CONNECT_S) as connection:
            connection.settimeout(QUIET_S)
            keep_alive(connection)
            connection.sendall(hello)
            rest = b""
            while True:
                try:
                    received = connection.recv(4096)
                except TimeoutError:
                    self._raise_if_stopped()
                    continue
                except ConnectionResetError:
                    return True
                if not received:
                    return True
                self._heard = time.monotonic()
                *lines, rest = (rest + received)[-NEWS_BYTES:].split(b"\n")
                if lines and hello:  # else it is the service's greeting
                    self._has_news = True
                    self._silent.hear(_names(lines[-1]), UNHEARD_S)

    def _raise_if_stopped(self) -> None:
        """Ask the service for an answer, again and again until `UNHEARD_S` after the last sign of life.

        The last two questions must be without an answer: the first may be, after both processes were stopped.
        """
        unanswered = 0
        while unanswered < 2 or time.monotonic() - self._heard < UNHEARD_S:
            if self._stopping.is_set() or service_answers(service_address(), ANSWER_S):
                self._heard = time.monotonic()
                return
            unanswered += 1
        raise _StoppedError

    def _unanswered(self) -> str:
        seconds = time.monotonic() - self._heard
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        return f"no sign of life for {seconds:.0f} s, since {since}"


class _StoppedError(Exception):
    """The service does not answer, and its connections are open."""


def service_answers(address: str | None, timeout_s: float) -> bool:
    """Whether the coordination service answers a new connection, be it by closing it.

    Raises:
        ConnectionRefusedError: Nobody listens there.
    """
    place = _address(address)
    if place is None:
        return True
    try:
        with socket.create_connection(place, timeout_s) as connection:
            connection.sendall(HTTP2_HELLO)
            connection.recv(1)
    except TimeoutError:
        return False
    except ConnectionRefusedError:
        raise
    except OSError:
        return True
    return True


def _listen(host: str, backlog: int) -> socket.socket:
    """Listen at the port that `PORT` names, or at any port where there is none, or somebody else listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError, OverflowError):  # taken, or no port at all
        return socket.create_server((host, environment_integer(PORT) or 0), family=family, backlog=backlog)
    return socket.create_server((host, 0), family=family, backlog=backlog)


def keep_alive(connection: socket.socket) -> None:
    """Have the system end a connection whose other machine does not answer for `UNHEARD_S`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # what was sent and is not acknowledged puts keepalive off
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNHEARD_S * 1000))


def _address(text: str | None) -> tuple[str, int] | None:
    host, _, port = (text or "").rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdecimal() else None


def _names(line: bytes) -> tuple[str, ...]:
    try:
        names = json.loads(line)
    except (ValueError, RecursionError):
        return ()
    return tuple(printable(name) for name in names if isinstance(name, str)) if isinstance(names, list) else ()


SAY_S = 60.0  # seconds between two lines
PROC = "/proc/net"
ESTABLISHED = "01"
WORKERS = "TPU_WORKER_HOSTNAMES"  # the variable in which GKE and TPU VMs name the hosts of a slice, with commas
NAMED = 8  # hosts that a line names


@contextlib.contextmanager
def say_who_is_missing(address: str | None, count: int | None, timeout_s: float) -> Iterator[None]:
    """Print a line a minute while the block waits for connections.

    JAX does not tell before all are there, so the kernel is asked who has a connection to the service's port.

    Args:
        address: host:port of the service where this process runs it; None: elsewhere, where the lines come from.
    """
    done = threading.Event()

    def say() -> None:
        assert address is not None
        waited = SAY_S
        while not done.wait(SAY_S):
            text = missing(int(address.rpartition(":")[2]), count)
            print_to_stderr(f"lockstep: waited {waited:.0f} of {timeout_s:.0f} s for the start: {text}")
            waited += SAY_S

    if address is not None:
        threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def missing(port: int, count: int | None) -> str:
    """Who has not connected to a port of this machine, by name where the platform names the hosts of the job."""
    peers = connected(port)
    connected_text = (
        f"{len(peers)} of {count} processes have connected" if count else f"{len(peers)} processes have connected"
    )
    hosts = {address for address, _ in peers}
    names = [name for name in os.environ.get(WORKERS, "").split(",") if name]
    absent = [f"worker {index} ({name})" for index, name in enumerate(names) if not _addresses(name) & hosts]
    if len(names) < 2 or not absent:
        return f"{connected_text}, from {_some(sorted(hosts))}" if hosts else connected_text
    return f"{connected_text}; {_some(absent)} {'has' if len(absent) == 1 else 'have'} not"


def connected(port: int, folder: str = PROC) -> set[tuple[str, int]]:
    """Address and port of whoever has a connection to a port of this machine; nobody where there is no such table."""
    remotes = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(folder, name).read_text(encoding="utf-8").splitlines()[1:]:
                local, remote, state = line.split()[1:4]
                if state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                    address, _, number = remote.rpartition(":")
                    remotes.add((_ip_address(address), int(number, 16)))
    return remotes


def _ip_address(digits: str) -> str:
    """An address as the kernel writes it: words of 32 bits in this machine's order of bytes."""
    words = [digits[at : at + 8] for at in range(0, len(digits), 8)]
    raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]  # IPv4 over a socket for both
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _addresses(name: str) -> set[str]:
    """The addresses of a host; none where its name is not known yet, as of a pod that does not run."""
    with contextlib.suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    return set()


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
