"""What each process did last: one overwritten key per process, which the others read when a wait times out."""

import collections
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping

from lockstep.errors import HostError
from lockstep.hosts._client import Client

DIRECTORY = "lockstep/heartbeat"
REMEMBERED_WAITS = 8
"""Keys in a heartbeat: the last ones at which the process waited for the others."""
INTERVAL_S = 0.5
"""Seconds between two posts of a process whose phase does not change."""
MIN_INTERVAL_S = 0.05
"""Seconds between two posts, at least, of a process whose phase changes often."""
SILENT_S = 1.5
"""Seconds without a post after which a process counts as silent, and errors name it as missing."""


@dataclasses.dataclass(frozen=True)
class PeerHeartbeat:
    """The last heartbeat that a process posted.

    Args:
        phase: The work that the process had begun.
        time_s: When it began, in seconds since 1970 by its own clock.
        alive_s: When it posted, in seconds since 1970 by its own clock; None where it has no thread that posts
            regularly.
        waits: The last keys at which it waited for the others, oldest first.
    """

    phase: str
    time_s: float
    alive_s: float | None
    waits: tuple[str, ...]

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
    """Posts what this process does, and with `start_heartbeat` that it lives.

    Args:
        client: The coordination service.
    """

    def __init__(self, client: Client):
        self._client = client
        self._waits: collections.deque[str] = collections.deque(maxlen=REMEMBERED_WAITS)
        self._phase = ("started", time.time())
        self._changed: threading.Event | None = None  # wakes the thread that posts, where there is one

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
        """Start a thread that posts every `INTERVAL_S` seconds, and soon after each change, so that no caller waits.

        Returns:
            A function that ends the thread.
        """
        changed, stopping = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._run, args=(changed, stopping), name="lockstep-heartbeat", daemon=True)
        self._changed = changed
        thread.start()

        def stop() -> None:
            self._changed = None
            stopping.set()
            changed.set()
            thread.join(2 * INTERVAL_S)

        return stop

    def _run(self, changed: threading.Event, stopping: threading.Event) -> None:
        try:
            while not stopping.is_set():
                changed.wait(INTERVAL_S)
                changed.clear()
                self._post(time.time())
                stopping.wait(MIN_INTERVAL_S)
        except (HostError, TimeoutError):
            return  # the service has ended, and with it the job

    def _publish(self) -> None:
        changed = self._changed
        if changed is None:
            self._post(None)
        else:
            changed.set()

    def _post(self, alive_s: float | None) -> None:
        value = json.dumps([*self._phase, alive_s, *self._waits.copy()])
        self._client.set(f"{DIRECTORY}/{self._client.index}", value.encode())


def heartbeats(client: Client) -> dict[int, PeerHeartbeat]:
    """Return the last heartbeat of every process that has posted one, by process number.

    The result is empty when the service does not answer.
    """
    try:
        posts = client.get_dir(DIRECTORY)
    except (HostError, TimeoutError):
        return {}
    found = {}
    for key, value in posts.items():
        phase, time_s, alive_s, *waits = json.loads(value)
        found[int(key.rpartition("/")[2])] = PeerHeartbeat(phase, time_s, alive_s, tuple(waits))
    return found


def describe_missing(peers: Mapping[int, PeerHeartbeat]) -> str:
    """Return a sentence for an error that names the silent processes; empty where there is none."""
    who = [f"process {i} ({peer})" for i, peer in sorted(peers.items()) if peer.silent]
    return f" Missing: {', '.join(who)}." if who else ""


def describe_elsewhere(peers: Mapping[int, PeerHeartbeat], phase: str) -> str:
    """Return a sentence for an error that names the processes that live, but are in another phase; empty for none."""
    who = [f"process {i} ({peer})" for i, peer in sorted(peers.items()) if not peer.silent and peer.phase != phase]
    return f" Elsewhere: {', '.join(who)}." if who else ""


def wait_for_missing(client: Client) -> str:
    """Return `describe_missing` as soon as a process is silent: for an error of a connection, which names no process.

    A process that has died is known within ``INTERVAL_S + SILENT_S``; after that the result is empty.
    """
    deadline = time.monotonic() + INTERVAL_S + SILENT_S
    while not (text := describe_missing(heartbeats(client))) and time.monotonic() < deadline:
        time.sleep(MIN_INTERVAL_S)
    return text
