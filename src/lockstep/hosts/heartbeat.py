"""What each process did last: one overwritten key per process, read by the others when a wait runs out of time."""

import collections
import dataclasses
import json
import time

from lockstep.errors import HostError
from lockstep.hosts._client import Client

DIRECTORY = "lockstep/heartbeat"
REMEMBERED_WAITS = 8


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a process.

    Args:
        phase: what it said it was doing.
        time_s: when it said so, seconds since 1970 by its own clock.
        waits: the last keys at which it waited for the others, oldest first.
    """

    phase: str
    time_s: float
    waits: tuple[str, ...]

    def __str__(self) -> str:
        return f"last phase {self.phase!r} {max(0.0, time.time() - self.time_s):.0f} s ago"


class Heart:
    """Posts this process's heartbeat.

    Args:
        client: the coordination service.
    """

    def __init__(self, client: Client):
        self._client = client
        self._waits: collections.deque[str] = collections.deque(maxlen=REMEMBERED_WAITS)
        self._phase = ("started", time.time())

    @property
    def phase(self) -> str:
        """What this process last said it was doing."""
        return self._phase[0]

    def enter(self, phase: str) -> None:
        """Say what this process does from now on."""
        self._phase = (phase, time.time())
        self._post()

    def wait_at(self, key: str) -> None:
        """Say that this process has arrived at ``key``."""
        self._waits.append(key)
        self._post()

    def _post(self) -> None:
        value = json.dumps([*self._phase, *self._waits])
        self._client.set(f"{DIRECTORY}/{self._client.index}", value.encode())


def heartbeats(client: Client) -> dict[int, Heartbeat]:
    """The last heartbeat of every process that has posted one; empty when the service does not answer."""
    try:
        posts = client.get_dir(DIRECTORY)
    except (HostError, TimeoutError):
        return {}
    found = {}
    for key, value in posts.items():
        phase, time_s, *waits = json.loads(value)
        found[int(key.rpartition("/")[2])] = Heartbeat(phase, time_s, tuple(waits))
    return found
