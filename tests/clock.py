"""Time in tests: a clock that only the test moves, and waits for events instead of for seconds."""

import queue
import threading
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""Seconds for what must happen: a machine that is busy with other things may need them."""


class Clock:
    """Stands for the module `time` in what is tested: ``monkeypatch.setattr(module, "time", Clock())``.

    A thread that sleeps goes on when the test says so, and the test sees it asleep.

    Args:
        now: The seconds that it shows.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._asleep: queue.Queue[float] = queue.Queue()
        self._awake = threading.Semaphore(0)

    def time(self) -> float:
        return self.now

    monotonic = perf_counter = time

    def sleep(self, seconds: float) -> None:
        self._asleep.put(seconds)
        assert self._awake.acquire(timeout=PATIENCE_S)

    def until_asleep(self) -> float:
        """Wait until a thread sleeps; return for how long it wants to."""
        return self._asleep.get(timeout=PATIENCE_S)

    def wake(self) -> None:
        """Let the thread that sleeps go on."""
        self._awake.release()


def until(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
