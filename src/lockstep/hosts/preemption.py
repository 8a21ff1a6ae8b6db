"""Requests to end the job: a signal on any process, or JAX's own notice that a machine is about to be taken."""

import contextlib
import signal
import time

from lockstep.errors import HostError
from lockstep.hosts._client import Client

DIRECTORY = "lockstep/preempted"
JAX_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""The key under which JAX's preemption service, where it runs, shows all processes that one of them got a SIGTERM."""
LOOK_S = 1.0
"""Seconds between two looks at that key: `Preemption.requested` is called before each launch."""


class Preemption:
    """Whether this process is asked to end, or another one that has published its request.

    Args:
        client: The coordination service.
    """

    def __init__(self, client: Client):
        self._client = client
        self._published = False
        self._next_look = 0.0
        self.signal: int | None = None
        """The signal that asked this process to end, or None."""

    def note(self, number: int) -> None:
        """Remember a signal; does nothing else, so a signal handler may call it."""
        if self.signal is None:
            self.signal = number

    def publish(self) -> None:
        """Publish to the other processes that a signal was noted here."""
        if self.signal is not None and not self._published:
            self._published = True
            self._client.set(f"{DIRECTORY}/{self._client.index}", b"")

    def requested(self) -> bool:
        """Return whether this process is asked to end. The leader reads JAX's notice, and notes it as a SIGTERM."""
        now = time.monotonic()
        if self.signal is None and self._client.index == 0 and now >= self._next_look:
            self._next_look = now + LOOK_S
            if self._client.peek(JAX_NOTICE) is not None:
                self.note(signal.SIGTERM)
        return self.signal is not None

    def requested_anywhere(self) -> bool:
        """Return whether any process has published that it is asked to end; for the leader, who decides for all."""
        return self.requested() or bool(self._client.get_dir(DIRECTORY))

    def clear(self) -> None:
        """Forget a noted signal, once what it ended has ended."""
        self.signal = None
        if self._published:
            self._published = False
            with contextlib.suppress(HostError, TimeoutError):
                self._client.delete(f"{DIRECTORY}/{self._client.index}")
