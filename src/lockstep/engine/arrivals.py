"""Requests that come while a generation runs, such as further turns of conversations; every host learns of all."""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from lockstep.engine.launches import Gate
from lockstep.engine.schedule import Scheduler
from lockstep.hosts import Hosts
from lockstep.types import Completion, FinishReason, Request

IDLE_S = 0.05
"""Seconds for which a host waits for its own arrivals before it meets the others, where nothing else is left to do."""


@runtime_checkable
class Arrivals(Protocol):
    """Requests that follow from answers to earlier ones. Every host has one, which knows its own share of what comes.

    Iterated over, it gives the requests that every host knows; None where there are none, and some may come.
    """

    def __iter__(self) -> Iterator[Request | None]:
        """Return what `Engine.stream` reads."""
        ...

    def take(self, wait_s: float) -> str:
        """Return what this host has to say to all: a text without meaning here, empty for nothing.

        Args:
            wait_s: The seconds to wait for something to say.
        """
        ...

    def hear(self, texts: Sequence[str]) -> None:
        """Take what every host has said, by process number; further requests follow from it, the same on every host."""
        ...

    def answered(self, completions: Sequence[Completion]) -> None:
        """Take answers, the same on every host; launches nothing."""
        ...

    def between_launches(self, scheduler: Scheduler) -> None:
        """Cancel what is not wanted any more, and forget conversations that have ended; the same on every host."""
        ...


class ArrivalGate(Gate):
    """A `Gate` at which every host also learns what has arrived on the others: one exchange instead of one barrier.

    Args:
        hosts: The hosts, inside a scope that has no other gate.
        max_seconds: The seconds that the run may last, from now on; None for no limit.
    """

    def __init__(self, hosts: Hosts, arrivals: Arrivals, max_seconds: float | None = None) -> None:
        super().__init__(hosts, max_seconds)
        self._arrivals, self._count = arrivals, 0
        self.idle_s = 0.0
        """Seconds in which there was nothing to launch until something arrived."""

    def __call__(self, error: Exception | None, *, done: bool = False, idle: bool = False) -> FinishReason | None:
        """See `Gate`; what was said is heard before it returns."""
        if done:
            return super().__call__(error, done=True)
        began = time.perf_counter()
        self._count += 1
        with self._hosts.run_on_all(f"between launches {self._count}", "generate") as meeting:
            if error is not None:
                raise error
            meeting.share((self._reason(), self._arrivals.take(IDLE_S if idle else 0.0)))
        self._arrivals.hear([text for _, text in meeting.shared])
        if idle:
            self.idle_s += time.perf_counter() - began
        return self._decided({reason for reason, _ in meeting.shared if reason is not None})
