"""The end of a process: its exit codes, one table for all backends, and work that it still has to finish."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitCode:
    """One row of the table."""

    code: int
    meaning: str  # what has happened, in a few words
    retried: bool = False  # whether `--retries` starts the job again after it: only what another try can cure


EXIT_CODES: dict[int, ExitCode] = {}
"""The table, by code."""


def _row(code: int, meaning: str, retried: bool = False) -> int:
    EXIT_CODES[code] = ExitCode(code=code, meaning=meaning, retried=retried)
    return code


DONE = _row(0, "done")
FAILED = _row(1, "failed: an error of the configuration, of the data or of the program")
USAGE = _row(2, "the command line cannot work")
PEER_FAILED = _row(85, "ended because another process failed, or its host is gone", retried=True)
WATCHDOG = _row(86, "ended by its watchdog: a device call outlived its time", retried=True)
WORKER_LOST = _row(87, "a worker was taken away while the job ran (preempted)", retried=True)
UNREACHABLE = _row(88, "a worker cannot be reached", retried=True)
PREFLIGHT = _row(89, "a worker is not fit to start the job")
REFUSED = _row(90, "the platform refused: permission, quota, a name or an option")
UNAVAILABLE = _row(91, "no capacity: the platform has no such workers now", retried=True)
SETUP_FAILED = _row(92, "a worker could not be set up")
FAULT = _row(93, "a fault of the hardware, the runtime or the network", retried=True)
FAULT_AGAIN = _row(94, "a fault again, with nothing saved since the attempt before")
NOT_FOUND = _row(127, "the program was not found")
HUNG_UP = _row(128 + signal.SIGHUP, "terminal closed (SIGHUP)")
INTERRUPTED = _row(128 + signal.SIGINT, "interrupted (Ctrl-C)")
ABORTED = _row(128 + signal.SIGABRT, "aborted, as by JAX where another process is gone (SIGABRT)", retried=True)
BUS_ERROR = _row(128 + signal.SIGBUS, "a fault of memory or of a mapped file (SIGBUS)", retried=True)
SEGMENTATION_FAULT = _row(128 + signal.SIGSEGV, "a fault inside a native library (SIGSEGV)", retried=True)
KILLED = _row(128 + signal.SIGKILL, "killed (SIGKILL, or the machine ran out of memory)", retried=True)
TERMINATED = _row(128 + signal.SIGTERM, "asked to end (SIGTERM), as before a preemption", retried=True)


ENDING = (signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a process to end and leave it time for a last save; libtpu has SIGHUP ignored by default."""


def describe_code(code: int) -> str:
    """An exit code, as a shell sees it (128 + n for signal n), and what it means, as text."""
    if code in EXIT_CODES:
        return f"exit code {code}, {EXIT_CODES[code].meaning}"
    if 128 < code < 128 + signal.NSIG and code - 128 in set(signal.Signals):
        return f"exit code {code}, ended by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def is_retried(code: int) -> bool:
    """Whether another try can cure what ended a job; the error of a user it cannot."""
    return code in EXIT_CODES and EXIT_CODES[code].retried


DIED = (KILLED, BUS_ERROR, SEGMENTATION_FAULT)
"""The codes of a process that died without a word: what others say after it is that it is gone."""


def cause_of[Ended](failed: Sequence[Ended], code: Callable[[Ended], int], own: Collection[Ended]) -> Ended:
    """Return the process that is the cause of the end of the others; the first of these, in the order of time.

    1. one that ended by an error of its own, and has said so;
    2. one that died without a word (`DIED`) before all others: their faults are its broken connections;
    3. one that ended by an error;
    4. one that ended by a fault, which may be a connection that broke as one of the above ended;
    5. one that ended because of another one, or by a signal.

    Args:
        failed: The processes that have not ended well, in the order of time; at least one.
        own: Those whose output has an error of their own.
    """
    raised = [process for process in failed if code(process) < 128 and code(process) not in (PEER_FAILED, FAULT)]
    announced = [process for process in raised if process in own]
    dead = [process for process in failed[:1] if code(process) in DIED]
    faults = [process for process in failed if code(process) == FAULT]
    return (announced or dead or raised or faults or failed)[0]


type Finish = Callable[[float], Iterable[str]]
"""Waits for some work, at most so many seconds, and returns what is not done by then, each as a sentence."""

WAIT_S = 2.0  # seconds that a process which ends of its own accord waits, over all work

_registered: list[Finish] = []


def before_end(finish: Finish) -> Finish:
    """Register work that the end of the process would lose; ``finish`` starts nothing, and any thread may call it."""
    _registered.append(finish)
    return finish


def finish_work(timeout_s: float) -> list[str]:
    """Wait for all work that is registered; return what is not done by then, each as a sentence. Nothing is raised."""
    deadline, left = time.monotonic() + timeout_s, list[str]()
    for finish in list(_registered):
        with contextlib.suppress(Exception):  # the process ends, and has its reason
            left += finish(max(0.0, deadline - time.monotonic()))
    return left


_given_up: list[Callable[[], bool]] = []


def give_work_up(is_done: Callable[[], bool]) -> None:
    """Note work in a thread that nobody waits for any more, and for which Python would wait at its exit."""
    _given_up.append(is_done)


def work_hangs() -> bool:
    """Whether work that was given up still goes on, so that the process has to end without Python's exit handlers."""
    return not all(is_done() for is_done in _given_up)
