"""What each process did last: one overwritten key per process, read by the others when a wait runs out of time."""

import collections
import dataclasses
import json
import threading
import time
from collections.abc import Callable

from lockstep.errors import HostError
from lockstep.hosts._client import Client

DIRECTORY = "lockstep/heartbeat"
REMEMBERED_WAITS = 8
BEAT_S = 0.5
"""Seconds between two signs of life of a process that does nothing new."""
PAUSE_S = 0.05
"""Seconds between two posts of a process that does much."""
SILENT_S = 1.5
"""Seconds without a sign of life that are told."""


@dataclasses.dataclass(frozen=True)
class PeerHeartbeat:
    """The last sign of life of a process.

    Args:
        phase: what it said it was doing.
        time_s: when it said so, seconds since 1970 by its own clock.
        alive_s: when it was last alive, by its own clock; None where it posts only what is new.
        waits: the last keys at which it waited for the others, oldest first.
    """

    phase: str
    time_s: float
    alive_s: float | None
    waits: tuple[str, ...]

    @property
    def silent(self) -> bool:
        """Whether a sign of life is overdue."""
        return self.alive_s is not None and time.time() - self.alive_s > SILENT_S

    def __str__(self) -> str:
        text = f"last phase {self.phase!r} {max(0.0, time.time() - self.time_s):.0f} s ago"
        if self.alive_s is not None and self.silent:
            text += f", no sign of life for {time.time() - self.alive_s:.0f} s"
        return text


class Heartbeat:
    """Posts this process's heartbeat.

    Args:
        client: the coordination service.
    """

    def __init__(self, client: Client):
        self._client = client
        self._waits: collections.deque[str] = collections.deque(maxlen=REMEMBERED_WAITS)
        self._phase = ("started", time.time())
        self._news: threading.Event | None = None  # of the thread that posts, where there is one

    @property
    def phase(self) -> str:
        """What this process last said it was doing."""
        return self._phase[0]

    def enter(self, phase: str) -> None:
        """Say what this process does from now on."""
        self._phase = (phase, time.time())
        self._tell()

    def wait_at(self, key: str) -> None:
        """Say that this process has arrived at ``key``."""
        self._waits.append(key)
        self._tell()

    def beat(self) -> Callable[[], None]:
        """Start a thread that posts from now on, so that nobody waits for it, and that shows that this process lives.

        Returns:
            A function that ends it.
        """
        news, stopping = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._run, args=(news, stopping), name="lockstep-heart", daemon=True)
        self._news = news
        thread.start()

        def stop() -> None:
            self._news = None
            stopping.set()
            news.set()
            thread.join(2 * BEAT_S)

        return stop

    def _run(self, news: threading.Event, stopping: threading.Event) -> None:
        try:
            while not stopping.is_set():
                news.wait(BEAT_S)
                news.clear()
                self._post(time.time())
                stopping.wait(PAUSE_S)
        except (HostError, TimeoutError):
            return  # the service has ended, and with it the job

    def _tell(self) -> None:
        news = self._news
        if news is None:
            self._post(None)
        else:
            news.set()

    def _post(self, alive_s: float | None) -> None:
        value = json.dumps([*self._phase, alive_s, *self._waits.copy()])
        self._client.set(f"{DIRECTORY}/{self._client.index}", value.encode())


def heartbeats(client: Client) -> dict[int, PeerHeartbeat]:
    """The last heartbeat of every process that has posted one; empty when the service does not answer."""
    try:
        posts = client.get_dir(DIRECTORY)
    except (HostError, TimeoutError):
        return {}
    found = {}
    for key, value in posts.items():
        phase, time_s, alive_s, *waits = json.loads(value)
        found[int(key.rpartition("/")[2])] = PeerHeartbeat(phase, time_s, alive_s, tuple(waits))
    return found


def missing(beats: dict[int, PeerHeartbeat]) -> str:
    """Which processes give no sign of life, as an error tells it; empty where all do."""
    who = [f"process {process} ({beat})" for process, beat in sorted(beats.items()) if beat.silent]
    return f" Missing: {', '.join(who)}." if who else ""


def elsewhere(beats: dict[int, PeerHeartbeat], phase: str) -> str:
    """Which processes live, but do something else than ``phase``, as an error tells it; empty where none does."""
    who = [f"process {i} ({beat})" for i, beat in sorted(beats.items()) if not beat.silent and beat.phase != phase]
    return f" Elsewhere: {', '.join(who)}." if who else ""


def wait_for_missing(client: Client) -> str:
    """`missing`, as soon as there is one: for who has lost a connection, and does not know to whom.

    A process that has died is known within ``BEAT_S + SILENT_S``.
    """
    deadline = time.monotonic() + BEAT_S + SILENT_S
    while not (text := missing(heartbeats(client))) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return text
