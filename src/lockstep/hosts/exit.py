"""Leaving a job promptly, so that one process that fails does not leave the others waiting for it.

Without this, a process that raises waits in JAX's own exit barrier for peers that wait for it (300 s), and one that
dies is only missed after ``heartbeat_timeout_s``. Measured on 2 processes: see tests/multiprocess/test_hosts.py.
"""

import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from lockstep.credentials import error_stack, without_credentials
from lockstep.errors import (
    CapacityError,
    CompilerError,
    ConfigError,
    HostError,
    LockstepError,
    PeerError,
    PromptError,
)
from lockstep.exits import FAILED, FAULT, INTERRUPTED, PEER_FAILED, TERMINATED, WAIT_S
from lockstep.hosts.fault import failure_code, limit_attempts
from lockstep.hosts.peers import announce_exit, end_process, failure_is_announced
from lockstep.hosts.start import current_without_devices, shutdown
from lockstep.printable import printable

HANDLER_S = 2.0
"""Seconds after SIGTERM that the main thread may spend in a call outside Python; then a thread ends the process."""

_handled = threading.Event()


class _Terminated(SystemExit):
    """SIGTERM has come: raised in the main thread.

    Args:
        phase: The phase in which it came; scopes that this error leaves may change the present one.
    """

    def __init__(self, phase: str) -> None:
        super().__init__(TERMINATED)
        self.phase = phase


def run_main(main: Callable[[], object], *, debug: bool = False) -> None:
    """Run a program's main function and leave the job in order, or at once when it fails.

    SIGTERM ends the program too, with a line that says so and code 143 on every process, unless the program has a
    handler of its own, as `Trainer` has. What a user can mend (a configuration, a prompt, a request or a program that
    is too large) is printed as its text, any other error with its stack; the reason is announced to the peers, and the
    process ends. In a job of several processes it does so without Python's exit handlers; reports behind a queue
    have 2 s, and what is lost is named.

    Args:
        main: The program; an int that it returns is the exit code.
        debug: Whether every error is printed with its stack, on every process that has it.

    Raises:
        SystemExit: The program failed in a job of one process; it has the exit code. Never raised when ``main``
            returns None or 0.

    Example:
        >>> def main() -> None:
        ...     hosts = lockstep.start()
        ...     print("training on", hosts.count, "process")
        >>> lockstep.run_main(main)
        training on 1 process
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # Python's default ends the process without an announcement, and the peers would wait for it.
        signal.signal(signal.SIGTERM, _terminate)
        _watch_signals()
    try:
        result = main()
        code = result if isinstance(result, int) else 0
        text = f"exit code {code}"
        if code == 0:
            shutdown()
    except KeyboardInterrupt:
        code, text = INTERRUPTED, "interrupted"
    except _Terminated as terminated:
        _leave_after_sigterm(terminated.phase)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = f"exit code {code}"
        if isinstance(error.code, str):
            text = error.code
            print(text, file=sys.stderr)
    except HostError as error:
        # The peers have the same error where all have it: to them a word is enough.
        code, kind = failure_code(error), type(error).__name__
        text = kind if _is_everywhere(error) else f"{kind}: {error}"
        _print_host_error(error, debug)
    except (ConfigError, PromptError, CapacityError, CompilerError) as error:
        code, text = FAILED, str(error)
        if debug:
            print(error_stack(error), file=sys.stderr, end="")
        print(f"error: {printable(without_credentials(text))}", file=sys.stderr)
    except BaseException as error:
        code, text = failure_code(error), f"{type(error).__name__}: {error}"
        print(error_stack(error), file=sys.stderr, end="")
    if code != 0:
        leave(code, text)


def _is_everywhere(error: HostError) -> bool:
    """Whether every process of this job has the error; that of a job of a process's own is known to it alone."""
    if not isinstance(error, PeerError):
        return error.on_every_process
    try:
        return error.processes == current_without_devices().count
    except HostError:  # the job has no service any more
        return error.processes > 1


def _print_host_error(error: HostError, debug: bool) -> None:
    """Print an error once per job where every process has it, with the stack of what nobody had foreseen.

    With ``debug``, every process prints its stack and that of its cause before.
    """
    if not _is_everywhere(error):
        print(error_stack(error), file=sys.stderr, end="")
        return
    cause = error.__cause__
    if debug:
        print(error_stack(error), file=sys.stderr, end="")
    elif cause is not None and not isinstance(cause, LockstepError):
        print(error_stack(cause), file=sys.stderr, end="")
    try:
        leader, alone = current_without_devices().is_leader, current_without_devices().count == 1
    except HostError:  # the job has no service any more: every process speaks for itself
        leader, alone = True, False
    if leader:
        text = cause if alone and isinstance(cause, LockstepError) else error
        print(f"error: {printable(without_credentials(str(text)))}", file=sys.stderr, flush=True)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    _handled.set()
    raise _Terminated(current_without_devices().last_phase)


def _watch_signals() -> None:
    """Start a thread that sees SIGTERM as well.

    Python runs a handler only when the main thread returns from the call that it waits in, and a process that waits
    for a slow peer would be killed before that.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with reader, writer:
            while seen := reader.recv(64):
                ours, hosts = signal.getsignal(signal.SIGTERM) is _terminate, current_without_devices()
                if signal.SIGTERM in seen and ours and hosts.count > 1 and not _handled.wait(HANDLER_S):
                    _leave_after_sigterm(hosts.last_phase)

    threading.Thread(target=watch, name="lockstep-signals", daemon=True).start()


def _leave_after_sigterm(phase: str) -> NoReturn:
    """Print that SIGTERM came in ``phase``, and end this process, and with it the job."""
    hosts = current_without_devices()
    code = TERMINATED
    text = f"was asked to end (SIGTERM) in phase {phase!r}"
    print(f"lockstep: process {hosts.index} of {hosts.count} {text}", file=sys.stderr, flush=True)
    leave(code, text, peers=code)


def leave(code: int, reason: str, peers: int = PEER_FAILED) -> NoReturn:
    """End this process with ``code``; in a job of several, announce why and do not wait for the peers.

    The process that runs the coordination service first gives them ``GRACE_S`` seconds to end on their own. Reports
    that are not made have as long, and those that are lost are named.

    Args:
        code: The exit code, not 0.
        reason: What the peers print about this process; where it failed, after the word "failed".
        peers: The exit code of the peers.

    Raises:
        SystemExit: The job has one process.
    """
    try:
        client = current_without_devices().client
    except HostError:
        sys.exit(code)
    if code == FAULT:  # a connection that breaks because another process has failed is no fault
        code = PEER_FAILED if failure_is_announced(client) else limit_attempts(client, code)
    if client.count == 1:
        sys.exit(code)
    announce_exit(client, reason, peers, WAIT_S)
    end_process(code)
