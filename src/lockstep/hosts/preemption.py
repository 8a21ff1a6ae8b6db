"""Requests to end the job: a signal on any process, or JAX's own notice that a machine is about to be taken."""

import signal
import time

from lockstep.hosts._client import Client

JAX_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""The key under which JAX's preemption service, where it runs, shows all processes that one of them got a SIGTERM."""
LOOK_S = 1.0
"""Seconds between two looks at that key: `Preemption.requested` is called before each launch."""


class Preemption:
    """Whether this process is asked to end; where that matters to the others, an exchange tells them.

    Args:
        client: The coordination service.
    """

    def __init__(self, client: Client):
        self._client = client
        self._next_look = 0.0
        self.signal: int | None = None
        """The signal that asked this process to end, or None."""
        self._noted = 0.0

    @property
    def age_s(self) -> float:
        """The seconds since the signal; 0 where there was none."""
        return 0.0 if self.signal is None else time.monotonic() - self._noted

    def note(self, number: int) -> None:
        """Remember a signal; does nothing else, so a signal handler may call it."""
        if self.signal is None:
            self._noted = time.monotonic()
            self.signal = number

    def requested(self) -> bool:
        """Return whether this process is asked to end. The leader reads JAX's notice, and notes it as a SIGTERM."""
        now = time.monotonic()
        if self.signal is None and self._client.index == 0 and now >= self._next_look:
            self._next_look = now + LOOK_S
            if self._client.peek(JAX_NOTICE) is not None:
                self.note(signal.SIGTERM)
        return self.signal is not None

    def clear(self) -> None:
        """Forget a noted signal, once what it ended has ended."""
        self.signal = None
