"""Heartbeats: one overwritten key per process with its last phase, which the others read when a wait times out."""

import collections
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from lockstep.errors import HostError
from lockstep.hosts._client import Client
from lockstep.printable import print_to_stderr, visible

DIRECTORY = "lockstep/heartbeat"
REMEMBERED_WAITS = 8  # keys in a heartbeat: the last ones at which the process waited for the others
INTERVAL_S = 0.5  # seconds between two posts of a process whose phase does not change
MIN_INTERVAL_S = 0.05  # seconds between two looks of the thread that posts for something new to post
LOOKING = 32  # processes from which on each looks less often for one that is silent
MISSING = "Missing: "  # how every error begins the list of the processes that are gone
SILENT_S = 1.5  # seconds without a post after which a process counts as silent, and errors name it as missing


@dataclasses.dataclass(frozen=True)
class PeerHeartbeat:
    """The last heartbeat that a process posted.

    Args:
        alive_s: When it posted, in seconds since 1970 by its own clock; None where it has no thread that posts
            regularly.
    """

    phase: str  # the work that the process had begun
    time_s: float  # when it began, in seconds since 1970 by its own clock
    alive_s: float | None
    waits: tuple[str, ...]  # the last keys at which it waited for the others, oldest first

    @property
    def silent(self) -> bool:
        """Whether the next heartbeat is overdue."""
        return self.alive_s is not None and time.time() - self.alive_s > SILENT_S

    def __str__(self) -> str:
        text = f"last phase {self.phase!r} {max(0.0, time.time() - self.time_s):.0f} s ago"
        if self.alive_s is not None and self.silent:
            text += f", no sign of life for {time.time() - self.alive_s:.0f} s"
        return text


class Heartbeat:
    """Posts what this process does, and with `start_heartbeat` that it lives."""

    def __init__(self, client: Client):
        self._client = client
        self._waits: collections.deque[str] = collections.deque(maxlen=REMEMBERED_WAITS)
        self._phase = ("started", time.time())
        self._has_thread = False
        self._changed = False  # since the thread's last post

    @property
    def phase(self) -> str:
        """The work that this process began last."""
        return self._phase[0]

    def enter(self, phase: str) -> None:
        """Publish that this process begins the work ``phase``."""
        self._phase = (phase, time.time())
        self._publish()

    def wait_at(self, key: str) -> None:
        """Publish that this process waits for the others at ``key``."""
        self._waits.append(key)
        self._publish()

    def start_heartbeat(self) -> Callable[[], None]:
        """Start a thread that posts every `INTERVAL_S` s, and `MIN_INTERVAL_S` after a change; return what ends it."""
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(stopping,), name="lockstep-heartbeat", daemon=True)
        self._has_thread = True
        thread.start()

        def stop() -> None:
            self._has_thread = False
            stopping.set()
            thread.join(2 * INTERVAL_S)

        return stop

    def _run(self, stopping: threading.Event) -> None:
        posted = time.monotonic()
        try:
            # A change does not wake this thread, which would hold up a process that is about to meet the others.
            while not stopping.wait(MIN_INTERVAL_S):
                if self._changed or time.monotonic() - posted >= INTERVAL_S:
                    self._changed, posted = False, time.monotonic()
                    self._post(time.time())
            self._post(time.time())
        except (HostError, TimeoutError):
            return  # the service has ended, and with it the job

    def _publish(self) -> None:
        if self._has_thread:
            self._changed = True
        else:
            self._post(None)

    def _post(self, alive_s: float | None) -> None:
        value = json.dumps([*self._phase, alive_s, *self._waits.copy()])
        self._client.set(f"{DIRECTORY}/{self._client.index}", value.encode())


def heartbeats(client: Client, processes: Iterable[int] | None = None) -> dict[int, PeerHeartbeat]:
    """Return the last heartbeat of every process that has posted one, by process number.

    The result is empty when the service does not answer. It is read once per job where all need it: every process that
    reads those of all others moves bytes that grow with the square of the processes.
    """
    try:
        if processes is None:
            posts = client.get_dir(DIRECTORY)
        else:
            values = {key: client.peek(key) for key in (f"{DIRECTORY}/{process}" for process in processes)}
            posts = {key: value for key, value in values.items() if value is not None}
    except (HostError, TimeoutError):
        return {}
    read = {}
    for key, value in posts.items():
        try:
            phase, time_s, alive_s, *waits = json.loads(value)
            process, alive_s = int(key.rpartition("/")[2]), None if alive_s is None else float(alive_s)
            read[process] = PeerHeartbeat(visible(phase), float(time_s), alive_s, tuple(map(visible, waits)))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # not posted by a process of ours
    return read


def longest_silent(peers: Mapping[int, PeerHeartbeat]) -> list[int]:
    """Return the silent processes, the longest silent first: the others may only be slow, or wait for that one."""
    silent = [(peer.alive_s or 0.0, process) for process, peer in peers.items() if peer.silent]
    return [process for _, process in sorted(silent)]


def describe_missing(peers: Mapping[int, PeerHeartbeat]) -> str:
    """Return a sentence for an error that names the silent processes; empty where there is none."""
    silent = [f"process {i} ({peers[i]})" for i in longest_silent(peers)]
    return f" {MISSING}{', '.join(silent)}." if silent else ""


def describe_elsewhere(peers: Mapping[int, PeerHeartbeat], phase: str) -> str:
    """Return a sentence for an error that names the processes that live, but are in another phase; empty for none."""
    elsewhere = [
        f"process {i} ({peer})" for i, peer in sorted(peers.items()) if not peer.silent and peer.phase != phase
    ]
    return f" Elsewhere: {', '.join(elsewhere)}." if elsewhere else ""


class SilentProcesses:
    """The processes that give no sign of life, as text; one that stays among them is printed once."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._since: dict[str, float] = {}  # process -> when it was first among them
        self._printed: set[str] = set()

    @property
    def unheard(self) -> list[str]:
        """Those that have been printed, as they are now."""
        return [name for name in self.names if name.partition(" (")[0] in self._printed]

    def hear(self, names: Sequence[str], limit_s: float) -> None:
        """Take the processes that are silent now, each as ``process 1 (...)``; print those that are for ``limit_s``."""
        self.names, now = tuple(names), time.monotonic()
        by_process = {name.partition(" (")[0]: name for name in names}
        self._since = {process: self._since.get(process, now) for process in by_process}
        self._printed.intersection_update(by_process)
        for process, name in by_process.items():
            if process not in self._printed and now - self._since[process] >= limit_s:
                self._printed.add(process)
                print_to_stderr(
                    f"lockstep: nothing is heard of {name}: it is stopped, or its Python stands still. Where JAX "
                    "misses its heartbeats too, it will end all processes."
                )


def wait_for_missing(client: Client) -> str:
    """Return `describe_missing` as soon as a process is silent: for an error of a connection, which names no process.

    A process that has died is known within ``INTERVAL_S + SILENT_S``; after that the result is empty.
    """
    deadline = time.monotonic() + INTERVAL_S + SILENT_S
    while not (text := describe_missing(heartbeats(client))) and time.monotonic() < deadline:
        time.sleep(MIN_INTERVAL_S * max(1, client.count // LOOKING))  # all survivors look at once
    return text
