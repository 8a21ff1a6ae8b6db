"""The end of a process: its exit codes, one table for all backends, and work that it still has to finish."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitCode:
    """One row of the table."""

    code: int
    meaning: str  # what has happened, in a few words
    retried: bool = False  # whether `--retries` starts the job again after it: only what another try can cure


DONE = 0
FAILED = 1
USAGE = 2
PEER_FAILED = 85
WATCHDOG = 86
WORKER_LOST = 87
UNREACHABLE = 88
PREFLIGHT = 89
REFUSED = 90
UNAVAILABLE = 91
SETUP_FAILED = 92
FAULT = 93
FAULT_AGAIN = 94
NOT_FOUND = 127
INTERRUPTED = 128 + signal.SIGINT
ABORTED = 128 + signal.SIGABRT
BUS_ERROR = 128 + signal.SIGBUS
KILLED = 128 + signal.SIGKILL
SEGMENTATION_FAULT = 128 + signal.SIGSEGV
TERMINATED = 128 + signal.SIGTERM

EXIT_CODES = {
    row.code: row
    for row in (
        ExitCode(code=DONE, meaning="done"),
        ExitCode(code=FAILED, meaning="failed: an error of the configuration, of the data or of the program"),
        ExitCode(code=USAGE, meaning="the command line cannot work"),
        ExitCode(code=PEER_FAILED, meaning="ended because another process failed, or its host is gone", retried=True),
        ExitCode(code=WATCHDOG, meaning="ended by its watchdog: a device call outlived its time", retried=True),
        ExitCode(code=WORKER_LOST, meaning="a worker was taken away while the job ran (preempted)", retried=True),
        ExitCode(code=UNREACHABLE, meaning="a worker cannot be reached", retried=True),
        ExitCode(code=PREFLIGHT, meaning="a worker is not fit to start the job"),
        ExitCode(code=REFUSED, meaning="the platform refused: permission, quota, a name or an option"),
        ExitCode(code=UNAVAILABLE, meaning="no capacity: the platform has no such workers now", retried=True),
        ExitCode(code=SETUP_FAILED, meaning="a worker could not be set up"),
        ExitCode(code=FAULT, meaning="a fault of the hardware, the runtime or the network", retried=True),
        ExitCode(code=FAULT_AGAIN, meaning="a fault again, with nothing saved since the attempt before"),
        ExitCode(code=NOT_FOUND, meaning="the program was not found"),
        ExitCode(code=INTERRUPTED, meaning="interrupted (Ctrl-C)"),
        ExitCode(code=ABORTED, meaning="aborted, as by JAX where another process is gone (SIGABRT)", retried=True),
        ExitCode(code=BUS_ERROR, meaning="a fault of memory or of a mapped file (SIGBUS)", retried=True),
        ExitCode(code=SEGMENTATION_FAULT, meaning="a fault inside a native library (SIGSEGV)", retried=True),
        ExitCode(code=KILLED, meaning="killed (SIGKILL, or the machine ran out of memory)"),
        ExitCode(code=TERMINATED, meaning="asked to end (SIGTERM), as before a preemption", retried=True),
    )
}
"""The table, by code."""


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
