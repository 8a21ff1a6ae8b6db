"""The gate before each launch: whether a host failed since the last one, and whether to go on."""

import time
from collections.abc import Callable

from lockstep.hosts import Hosts
from lockstep.types import FinishReason


class Gate:
    """Holds every host before each launch until all can make it; pass it as ``gate`` to `Engine.run`, on every host.

    While nothing is wrong that is one barrier of the coordination service, and nothing in a job of one process. An
    error on any host is raised on all of them, so that none waits in a launch for one that will never make it. The
    leader ends the run by its clock when its time is over, and a signal on any host ends it. A launch is never
    interrupted, so a run can take longer by one launch.

    Args:
        hosts: The hosts, inside a scope that has no other gate.
        max_seconds: The seconds that the run may last, from now on; None for no limit.
        clock: Gives seconds; read on the leader alone.

    Example:
        >>> lockstep.engine.Gate(hosts, max_seconds=60.0).preempted
        False
    """

    def __init__(
        self, hosts: Hosts, max_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hosts = hosts
        self._clock = clock
        self._end = None if max_seconds is None else clock() + max_seconds
        self.preempted = False
        """Whether the run was aborted because the job is asked to end; the same on every host."""

    def __call__(self, error: Exception | None, *, done: bool = False) -> FinishReason | None:
        """Returns when every host is here, and why the run ends early; None where it goes on.

        Args:
            error: What went wrong on this host since the last launch, or None.
            done: Whether there is nothing left to launch, so that no time is over and no signal matters.

        Raises:
            PeerError: Something went wrong on at least one host. The text is the same on every host; a host's own error
                is its cause.
            HostTimeoutError: Not all came in time; names the missing ones and their last phase.
        """
        reasons = self._hosts.reasons_to_stop("between launches", error, None if done else self._reason())
        self.preempted = FinishReason.CANCELLED in reasons
        if self.preempted:
            return FinishReason.CANCELLED
        return FinishReason.BUDGET if FinishReason.BUDGET in reasons else None

    def _reason(self) -> FinishReason | None:
        if self._hosts.preemption.requested():
            return FinishReason.CANCELLED
        over = self._hosts.is_leader and self._end is not None and self._clock() >= self._end
        return FinishReason.BUDGET if over else None
