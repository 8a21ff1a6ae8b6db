"""A limit on the time of a run: what is unfinished then comes back as it is."""

import time
from collections.abc import Callable

from lockstep.hosts import Hosts
from lockstep.schedule import Scheduler
from lockstep.types import FinishReason

_OVER, _GO_ON = b"over", b"go on"


class Budget:
    """Abandons a run when its time is over: pass it as ``between_launches``, on every host.

    The leader's clock decides, and tells the others before each launch, without a device program (about a millisecond).
    A launch is never interrupted, so a run can take longer by one launch.

    Args:
        hosts: inside a scope in which no name begins with ``budget/``.
        max_seconds: that the run may last, from now on.
        clock: seconds; read on the leader alone.
    """

    def __init__(self, hosts: Hosts, max_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._hosts = hosts
        self._clock = clock
        self._end = clock() + max_seconds
        self._checks = 0

    def __call__(self, scheduler: Scheduler) -> None:
        if scheduler.done:
            return
        self._checks += 1
        word = None
        if self._hosts.is_leader:
            word = _OVER if self._clock() >= self._end else _GO_ON
        if self._hosts.broadcast(f"budget/{self._checks}", word) == _OVER:
            scheduler.abandon(FinishReason.BUDGET)
