"""Every exit code of a process, of a job and of the launcher: one table, the same for all backends (no import)."""

import dataclasses
import signal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitCode:
    """One row of the table.

    Args:
        code: The number.
        meaning: What has happened, in a few words.
        retried: Whether ``--retries`` starts the job again after it: only what another try can cure.
    """

    code: int
    meaning: str
    retried: bool = False


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
    """Return an exit code and what it means, as text.

    Args:
        code: The exit code of a process as a shell sees it: 128 + n for signal n.
    """
    if code in EXIT_CODES:
        return f"exit code {code}, {EXIT_CODES[code].meaning}"
    if 128 < code < 128 + signal.NSIG and code - 128 in set(signal.Signals):
        return f"exit code {code}, ended by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def is_retried(code: int) -> bool:
    """Whether another try can cure what ended a job; the error of a user it cannot.

    Args:
        code: The exit code of the process that failed first.
    """
    return code in EXIT_CODES and EXIT_CODES[code].retried
