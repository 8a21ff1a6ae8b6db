"""A program's main function, whose end is that of the job: in order, or at once on every process."""

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from lockstep.errors import HostError
from lockstep.exits import ENDING, work_hangs
from lockstep.hosts.exit import leave, outcome, print_error
from lockstep.hosts.hosts import Hosts
from lockstep.hosts.peers import end_process
from lockstep.hosts.start import current_without_devices, shutdown
from lockstep.printable import print_to_stderr

HANDLER_S = 2.0
"""Seconds after a signal that the main thread may spend in a call outside Python; then a thread ends the process."""

AGAIN_S = 0.05
"""Seconds until a signal is sent again whose exception was dropped."""

_handled = threading.Event()


class Terminated(SystemExit):
    """A signal of `ENDING` has come: raised in the main thread.

    Args:
        phase: What the process was doing, as its last line and those of its peers say it.
        number: The signal.
    """

    def __init__(self, phase: str, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)
        self.phase, self.number = phase, number


def run_main(main: Callable[[], object], *, debug: bool = False) -> None:
    """Run a program's main function and leave the job in order, or at once when it fails.

    SIGTERM and SIGHUP end the program too, with a line that says so and code 143 or 129 on every process, unless the
    program has a handler of its own, as `Trainer` has, or ignores the signal, as under nohup. What a user can mend (a
    configuration, a prompt, a request or a program that is too large) is printed as its text, any other error with its
    stack; the reason is announced to the peers, and the process ends. In a job of several processes it does so without
    Python's exit handlers; reports behind a queue have 2 s, and what is lost is named.

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
    unhandled = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is threading.main_thread() and unhandled:
        # Python's default ends the process without an announcement, and the peers would wait for it.
        for number in unhandled:
            signal.signal(number, _terminate)
        _watch_signals()
        sys.unraisablehook = functools.partial(_deliver_again, sys.unraisablehook)
    try:
        result = main()
        code = result if isinstance(result, int) else 0
        text = f"exit code {code}"
        if code == 0:
            shutdown()
            if work_hangs():
                end_process(code)
    except Terminated as terminated:
        _leave_after_signal(terminated.phase, terminated.number)
    except BaseException as error:
        print_error(_job(), error, debug)
        code, text = outcome(_job(), error)
    if code != 0:
        leave(_job(), code, text)


def _job() -> Hosts | None:
    """The processes of the job; None where it has no service any more."""
    try:
        return current_without_devices()
    except HostError:
        return None


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    _handled.set()
    raise Terminated(current_without_devices().last_phase, number)


def _deliver_again(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Send a signal again whose exception was dropped, as in a callback of the garbage collector: JAX has one."""
    error = unraisable.exc_value
    if isinstance(error, Terminated | KeyboardInterrupt):
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()
    else:
        hook(unraisable)


def _watch_signals() -> None:
    """Start a thread that sees the signals of `ENDING` as well.

    Python runs a handler only when the main thread returns from the call that it waits in, and a process that waits
    for a slow peer would be killed before that. One that waits for a step tells those that wait for their rows.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with reader, writer:
            while seen := reader.recv(64):
                hosts = current_without_devices()
                for number in (number for number in ENDING if number in seen):
                    is_ours = signal.getsignal(number) is _terminate
                    if hosts.preemption.in_order:
                        with contextlib.suppress(HostError, TimeoutError):
                            hosts.preemption.tell()
                    if is_ours and hosts.count > 1 and not _handled.wait(HANDLER_S):
                        _leave_after_signal(hosts.last_phase, number)

    threading.Thread(target=watch, name="lockstep-signals", daemon=True).start()


def _leave_after_signal(phase: str, number: int) -> NoReturn:
    """Print that a signal came in ``phase``, and end this process, and with it the job."""
    hosts, code = current_without_devices(), 128 + number
    text = f"was asked to end ({signal.Signals(number).name}) in phase {phase!r}"
    print_to_stderr(f"lockstep: process {hosts.index} of {hosts.count} {text}")
    leave(hosts, code, text, peers=code)
