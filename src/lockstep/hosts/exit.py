"""Leaving a job promptly, so that one process that fails does not leave the others waiting for it.

Without this, a process that raises waits in JAX's own exit barrier for peers that wait for it (300 s), and one that
dies is only missed after ``heartbeat_timeout_s``. Measured on 2 processes: see tests/multiprocess/test_hosts.py.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn

from lockstep.errors import CapacityError, CompilerError, ConfigError, HostError, LockstepError, PeerError, PromptError
from lockstep.exits import FAILED, FAULT, INTERRUPTED, PEER_FAILED, WAIT_S, work_hangs
from lockstep.files import advice_of
from lockstep.hosts.fault import failure_code, limit_attempts
from lockstep.hosts.heartbeat import MISSING, describe_missing, heartbeats
from lockstep.hosts.hosts import Hosts
from lockstep.hosts.peers import announce_exit, end_process, failure_is_announced
from lockstep.printable import error_line, error_stack, print_to_stderr

USER_ERRORS = (ConfigError, PromptError, CapacityError, CompilerError)
"""Errors that a user can mend, printed without a stack."""


def end_job_on_uncaught_errors(hosts: Hosts) -> Callable[[], None]:
    """Have an error that nothing catches end the job as in `run_main`, in a program that does not use it.

    The error is printed by the ``sys.excepthook`` that is there. An interactive Python goes on, as it does. What is
    returned takes this back.
    """
    before = sys.excepthook

    def leave_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if before is sys.__excepthook__:
            print_error(hosts, error)
        else:
            before(kind, error, trace)
        if not hasattr(sys, "ps1"):
            leave(hosts, *outcome(hosts, error))

    def restore() -> None:
        if sys.excepthook is leave_job:
            sys.excepthook = before

    sys.excepthook = leave_job
    return restore


def outcome(hosts: Hosts | None, error: BaseException) -> tuple[int, str]:
    """Exit code of a program that an error ends, and the text that the peers print about it."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return code, error.code if isinstance(error.code, str) else f"exit code {code}"
    kind = type(error).__name__
    if isinstance(error, USER_ERRORS):
        return FAILED, str(error)
    return failure_code(error), f"{kind}: {error}"


@contextlib.contextmanager
def closing_on_leader(hosts: Hosts, close: Callable[[], object]) -> Iterator[None]:
    """Run a block, and at its end ``close`` on the leader.

    The others wait for it where they have come to the end as the leader has, in order or with an error that every
    process has: a process that leaves with an error ends the others soon after.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, HostError) and is_everywhere(hosts, error):
            with contextlib.suppress(HostError):
                _close(hosts, close)
        elif hosts.is_leader:
            close()
        raise
    _close(hosts, close)


def _close(hosts: Hosts, close: Callable[[], object]) -> None:
    with hosts.run_on_all("closing"):
        if hosts.is_leader:
            close()


def print_error(hosts: Hosts | None, error: BaseException, debug: bool = False) -> None:
    """Print an error that ends a program: without its stack where a user can mend it."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            print_to_stderr(error.code)
    elif isinstance(error, HostError):
        _print_host_error(hosts, error, debug)
    elif isinstance(error, USER_ERRORS) or advice_of(error):
        if debug:
            print_to_stderr(error_stack(error), end="")
        print_to_stderr(error_line(error, "" if isinstance(error, USER_ERRORS) else advice_of(error)))
    else:
        print_to_stderr(error_stack(error), end="")


def is_everywhere(hosts: Hosts | None, error: HostError) -> bool:
    """Return whether every process of this job has an error; that of a job of a process's own is known to it alone."""
    if not isinstance(error, PeerError):
        return error.on_every_process
    return error.processes > 1 if hosts is None else error.processes == hosts.count


def _print_host_error(hosts: Hosts | None, error: HostError, debug: bool) -> None:
    """Print an error once per job where every process has it, with the stack of what nobody had foreseen.

    With ``debug``, every process prints its stack and that of its cause before.
    """
    if not is_everywhere(hosts, error):
        print_to_stderr(error_stack(error), end="")
        return
    cause = error.__cause__
    if debug:
        print_to_stderr(error_stack(error), end="")
    elif cause is not None and not isinstance(cause, LockstepError) and not advice_of(cause):
        print_to_stderr(error_stack(cause), end="")
    if hosts is None or hosts.is_leader:  # without a service every process speaks for itself
        alone = hosts is not None and hosts.count == 1
        text = cause if alone and isinstance(cause, LockstepError) else error
        print_to_stderr(error_line(text, "" if cause is None or text is cause else advice_of(cause)))


def leave(hosts: Hosts | None, code: int, reason: str, peers: int = PEER_FAILED) -> NoReturn:
    """End this process with ``code``; in a job of several, announce why and do not wait for the peers.

    The process that runs the coordination service first gives them ``GRACE_S`` seconds to end on their own. Reports
    that are not made have as long, and those that are lost are named.

    Args:
        reason: What the peers print about this process; where it failed, after the word "failed". After a fault, which
            a runtime reports of its own connections alone, the processes that give no sign of life stand before it.

    Raises:
        SystemExit: The job has one process, or no service any more.
    """
    if hosts is not None and hosts.client.count == 1 and code == FAULT:
        code = limit_attempts(hosts.client, code)
    if hosts is None or hosts.client.count == 1:
        if work_hangs():
            end_process(code)
        sys.exit(code)
    client = hosts.client
    if code == FAULT:
        code, missing = _judge_fault(hosts)
        if missing and MISSING not in reason:
            print_to_stderr(f"lockstep: process {hosts.index} of {hosts.count} ends because of that fault.{missing}")
            reason = f"{missing.strip()} {reason}"
    announce_exit(client, reason, peers, WAIT_S)
    end_process(code)


def _judge_fault(hosts: Hosts) -> tuple[int, str]:
    """The exit code after a fault, and a sentence that names the processes that give no sign of life.

    A connection that breaks because another process has failed, or is gone, is no fault of this one.
    """
    client = hosts.client
    if failure_is_announced(client):
        return PEER_FAILED, describe_missing(heartbeats(client))
    missing = hosts.missing()
    code = limit_attempts(client, FAULT)
    return PEER_FAILED if missing and code == FAULT else code, missing
