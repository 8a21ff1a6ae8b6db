"""Requests that come while a generation runs, such as further turns of conversations; every host learns of all."""

import abc
import time
from collections.abc import Iterator, Sequence

from lockstep.engine.launches import Gate, Observer
from lockstep.hosts import Hosts, Watchdog
from lockstep.types import FinishReason, Request

IDLE_S = 0.05
"""Seconds for which a host waits for its own arrivals before it meets the others, where nothing else is left to do."""


class Arrivals(Observer, abc.ABC):
    """Requests that follow from answers to earlier ones. Every host has one, which knows its own share of what comes.

    Iterated over, it gives the requests that every host knows; None where there are none, and some may come. What it
    does as an observer must be the same on every host.
    """

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Request | None]:
        """Return what `Engine.stream` reads."""

    @abc.abstractmethod
    def take(self, wait_s: float) -> str:
        """Return what this host has to say to all: a text without meaning here, empty for nothing.

        Args:
            wait_s: The seconds to wait for something to say.
        """

    @abc.abstractmethod
    def hear(self, texts: Sequence[str]) -> None:
        """Take what every host has said, by process number; further requests follow from it, the same on every host."""


class ArrivalGate(Gate):
    """A `Gate` at which every host also learns what has arrived on the others: one exchange instead of one barrier.

    Args:
        hosts: The hosts, inside a scope that has no other gate.
        max_seconds: The seconds that the run may last, from now on; None for no limit.
    """

    def __init__(
        self, hosts: Hosts, arrivals: Arrivals, max_seconds: float | None = None, watchdog: Watchdog | None = None
    ) -> None:
        super().__init__(hosts, max_seconds, watchdog=watchdog, observer=arrivals)
        self._meets, self._arrivals, self._count = hosts, arrivals, 0
        self.idle_s = 0.0
        """Seconds in which there was nothing to launch until something arrived."""

    def __call__(self, error: Exception | None, *, done: bool = False, idle: bool = False) -> FinishReason | None:
        """See `Gate`; what was said is heard before it returns."""
        if done:
            return super().__call__(error, done=True)
        began = time.perf_counter()
        self._count += 1
        with self._meets.run_on_all(f"between launches {self._count}", "generate") as meeting:
            if error is not None:
                raise error
            meeting.share((self._reason(), self._arrivals.take(IDLE_S if idle else 0.0)))
        self._arrivals.hear([text for _, text in meeting.shared])
        if idle:
            self.idle_s += time.perf_counter() - began
        return self._decided({reason for reason, _ in meeting.shared if reason is not None})
