"""What ends a run early, checked between launches: its time is over, or the whole job is asked to end."""

import time
from collections.abc import Callable

from lockstep.hosts import Hosts
from lockstep.schedule import Scheduler
from lockstep.types import FinishReason

_OVER, _PREEMPTED, _GO_ON = b"over", b"preempted", b"go on"


class Budget:
    """Aborts a run when its time is over or its job is to end: pass it as ``between_launches``, on every host.

    The leader decides, by its own clock and by the signals that any process has published, and broadcasts its decision
    before each launch, without a device program (about a millisecond). A launch is never interrupted, so a run can take
    longer by one launch; a signal that comes at the moment of the leader's check is seen one launch later.

    Args:
        hosts: The hosts, inside a scope in which no name begins with ``budget/``.
        max_seconds: The seconds that the run may last, from now on; None for no limit.
        clock: Gives seconds; read on the leader alone.
    """

    def __init__(
        self, hosts: Hosts, max_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hosts = hosts
        self._clock = clock
        self._end = None if max_seconds is None else clock() + max_seconds
        self._checks = 0
        self.preempted = False
        """Whether the run was aborted because the job is asked to end; the same on every host."""

    def __call__(self, scheduler: Scheduler) -> None:
        if scheduler.done:
            return
        self._checks += 1
        self._hosts.preemption.publish()
        decision = self._decide() if self._hosts.is_leader else None
        decision = self._hosts.broadcast(f"budget/{self._checks}", decision)
        self.preempted = decision == _PREEMPTED
        if decision != _GO_ON:
            scheduler.abort(FinishReason.CANCELLED if self.preempted else FinishReason.BUDGET)

    def _decide(self) -> bytes:
        if self._hosts.preemption.requested_anywhere():
            return _PREEMPTED
        return _OVER if self._end is not None and self._clock() >= self._end else _GO_ON
