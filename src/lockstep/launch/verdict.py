"""Which worker's failure ended a job, and whether another try can help: pure functions."""

import dataclasses
from collections.abc import Sequence

from lockstep.exits import DONE, FAULT, PEER_FAILED, UNREACHABLE, WORKER_LOST, is_retried

CAUSE_S = 4.0
"""Seconds after a process ended because of another one in which that other one may end too, and is then named.

A process of lockstep that fails gives its peers up to 3 s to go first (lockstep.hosts.peers).
"""
UNCLEAR_S = 20.0
"""Seconds after a failure for which a worker that cannot be reached may come back; then it was the cause."""
ASKED = "the launcher asked for it"
"""The reason that a worker notes when it was told to end the command (lockstep.launch.agent.supervisor)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How the command has ended on one worker.

    Args:
        worker: The worker's number.
        code: Its exit code.
        at: When, in seconds since 1970 by the launcher's clock.
        reason: What ended it, where it did not end by itself.
    """

    worker: int
    code: int
    at: float
    reason: str = ""


def first_failure(endings: Sequence[Ending], *, unreachable: bool, all_ended: bool, waited_s: float) -> Ending | None:
    """The ending that is the cause of the others; None while that is not known, or nothing has failed.

    A worker that was lost is the cause whatever the others say: what they report is that it is gone. Otherwise it is
    the first that ended by an error of its own, before a fault (which may be a connection that broke as that one
    ended), and before those that ended because of another one or by a signal.

    Args:
        endings: Those that there are.
        unreachable: Whether a worker cannot be reached at the moment.
        all_ended: Whether there will be no more.
        waited_s: Seconds since the first of them came.
    """
    failed = sorted((each for each in endings if each.code != DONE), key=lambda each: each.at)
    lost = [each for each in failed if each.code in (WORKER_LOST, UNREACHABLE)]
    if lost:
        return lost[0]
    if not failed or unreachable:
        return None
    raised = [each for each in failed if each.code < 128 and each.code not in (PEER_FAILED, FAULT)]
    if raised or all_ended or waited_s > CAUSE_S:
        return (raised or [each for each in failed if each.code == FAULT] or failed)[0]
    return None


def can_retry(cause: Ending) -> bool:
    """Whether another try can help: not after an error of the user's, nor where somebody has stopped the job.

    Args:
        cause: The first failure.
    """
    return cause.reason != ASKED and is_retried(cause.code)
