"""Which process of a job failed first, by the codes and the output of those that have ended."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from lockstep.exits import DONE, FAULT, PEER_FAILED, UNREACHABLE, WORKER_LOST, cause_of
from lockstep.launch.backend import ERROR

LAST_LINES = 40  # number of last lines of a failed process that are shown again
LAST_BYTES = 1 << 16  # bytes of a file that are read for them
CAUSE_S = 4.0
"""Seconds after a process ended because of another one in which that other one may end too, and is then named.

A process of lockstep that fails gives its peers up to 3 s to go first (lockstep.hosts.peers).
"""
QUIET_S = 0.5  # seconds after a process ended without a word in which the output of another may say what has failed
_FAILED_ON = re.compile(ERROR + rb"\d+ of \d+ processes failed at .*?\. process(?:es)? (\d+)")
"""The error that all processes were told, which the leader prints (lockstep.hosts.exchange)."""
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(: |$)")
_BROKEN_CONNECTION = re.compile(
    rb"Gloo|by peer|coordination service|[Ss]ocket closed|UNAVAILABLE: |DEADLINE_EXCEEDED: |HostTimeoutError|PeerError"
)
"""Words of an error that a process has because another one is gone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of the command on one worker."""

    worker: int
    code: int
    at: float  # when, in seconds since 1970 by the launcher's clock
    reason: str = ""  # what ended it, where it did not end by itself


def first_failure(
    endings: Sequence[Ending],
    *,
    unreachable: bool,
    all_ended: bool,
    waited_s: float,
    themselves: Collection[int] | None = None,
) -> Ending | None:
    """The ending that is the cause of the others; None while that is not known, or nothing has failed.

    A worker that was lost is the cause whatever the others say: what they report is that it is gone. Otherwise see
    `cause_of`.

    Args:
        unreachable: Whether a worker cannot be reached at the moment.
        themselves: The workers whose output has an error of their own (`failed_by_themselves`); None: it is not known.
    """
    failed = sorted((ending for ending in endings if ending.code != DONE), key=lambda ending: ending.at)
    lost = [ending for ending in failed if ending.code in (WORKER_LOST, UNREACHABLE)]
    if lost:
        return lost[0]
    if not failed or unreachable:
        return None
    raised = [ending for ending in failed if ending.code < 128 and ending.code not in (PEER_FAILED, FAULT)]
    own = raised if themselves is None else [ending for ending in raised if ending.worker in themselves]
    if own or all_ended or waited_s > (CAUSE_S if themselves or not raised else QUIET_S):
        return cause_of(failed, lambda ending: ending.code, own)
    return None


def failed_by_themselves(last: Sequence[Iterable[bytes]]) -> set[int]:
    """The processes whose output says that they failed by an error of their own."""
    lines = [list(output) for output in last]
    told = {int(report[1]) for output in lines for line in output if (report := _FAILED_ON.match(line))}
    return told or {index for index, output in enumerate(lines) if has_error_of_its_own(output)}


def failed_by_their_logs(logs: Iterable[tuple[int, int, Path]]) -> set[int]:
    """As `failed_by_themselves`, of logs of one attempt (`record.kept_logs`)."""
    tails = {}
    for _, worker, path in logs:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_BYTES))
            tails[worker] = file.read().splitlines()[-LAST_LINES:]
    return failed_by_themselves([tails.get(index, []) for index in range(max(tails, default=-1) + 1)])


def has_error_of_its_own(lines: Iterable[bytes]) -> bool:
    """Whether lines have an ``error: ``, or a stack that ends in no broken connection."""
    is_own = in_stack = False
    for line in lines:
        if line.startswith(ERROR):
            is_own = True
        elif line.startswith((b"Traceback (most recent call last):", b'  File "')):
            in_stack = True
        elif in_stack and _EXCEPTION.match(line):
            if _BROKEN_CONNECTION.search(line):
                return False
            is_own, in_stack = True, False
    return is_own


def tail_to_show(index: int, last: Sequence[Collection[bytes]]) -> tuple[int, list[bytes]]:
    """The process whose last lines explain a failure, and these; none where an ``error: `` line says it already."""
    themselves = failed_by_themselves(last)
    if themselves and index not in themselves:
        index = min(themselves)
    lines = list(last[index])
    is_shown = any(line.startswith(ERROR) for line in lines)
    told = any(_FAILED_ON.match(line) for output in last for line in output)
    return index, [] if is_shown or (told and not has_error_of_its_own(lines)) else lines
