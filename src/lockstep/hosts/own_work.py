"""Work of one process alone: the leader's, in which no device program may be launched, and a host's in a thread."""

import abc
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import jax

from lockstep.errors import HostTimeoutError, LaunchMismatchError, LockstepError, message_of
from lockstep.printable import get_logger

log = get_logger(__name__)

MSG_LAUNCH_ALONE = (
    "{program} was launched inside leader-only work. This process does that alone, so its devices would be a launch "
    "ahead of all others and the job would hang or die at the next collective (under a global mesh even jnp.zeros(()) "
    "runs on every device). Use NumPy and values already fetched, or compute it on every process before this scope."
)


@contextlib.contextmanager
def leader_only() -> Iterator[None]:
    """Open a scope in which launching a device program raises, whether it was compiled before or not.

    Reading an array that is wholly on this process's devices stays possible. The scope covers the calling thread alone.

    Raises:
        LaunchMismatchError: A program was launched inside; the error of JAX is its cause.

    Example:
        >>> with lockstep.leader_only():
        ...     text = tokenizer.decode([1, 2, 3])  # host work: fine
    """
    with jax.no_execution(True):
        try:
            yield
        except Exception as error:  # JAX's RuntimeError, or whatever a library in between made of it
            if "no_execution" not in message_of(error):
                raise
            match = re.search(r"execute function (\S+),", message_of(error))
            program = f"the device program {match[1]!r}" if match else "a device program"
            raise LaunchMismatchError(MSG_LAUNCH_ALONE.format(program=program)) from error


def try_leader_only(task: str, work: Callable[[], object], consequence: str) -> bool:
    """Do work of the leader's in which a launch raises; what fails is logged; return whether it succeeded.

    Args:
        consequence: What the failure means for the run, as the log says it.
    """
    try:
        with leader_only():
            work()
    except (Exception, SystemExit) as error:  # a tracker, a metric and a disk are others' code
        stack = None if isinstance(error, LockstepError) else error
        log.error("%s failed on the leader; %s: %s: %s", task, consequence, type(error).__name__, error, exc_info=stack)
        return False
    return True


STOP_S = 5.0  # seconds that a thread has to end when its work is given up


class Stopped(Exception):
    """The work was given up; nobody sees this but the thread."""


class HostThread(abc.ABC):
    """A context manager that works in a thread; after the context it does nothing more.

    The thread ends with the context, at its next step, which is waited for some seconds; it does not keep the
    interpreter alive.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._done = self._stopped = False
        self._error: BaseException | None = None
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Have the thread end after the step that it is at."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(STOP_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the work is done, or for some seconds; return whether it is, or raise what it raised.

        Raises:
            HostTimeoutError: No step has ended for the thread's ``timeout_s``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            if not self._done and time.monotonic() - self._last > self._timeout_s:
                raise HostTimeoutError(
                    f"{self._stall()} for {self._timeout_s:g} s. Check the disk, or the network and the access to the "
                    "bucket, or raise timeout_s."
                )
            return self._done

    @abc.abstractmethod
    def _work(self) -> None:
        """Do the work, in the thread."""

    @abc.abstractmethod
    def _stall(self) -> str:
        """The description of a step that does not end, such as "nothing of the checkpoint was written"."""

    def _end_step(self) -> None:
        """Say that a step has ended."""
        self._last = time.monotonic()

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise Stopped

    def _run(self) -> None:
        try:
            self._work()
        except Stopped:
            return
        except BaseException as error:
            self._error = error
        with self._changed:
            self._done = self._error is None
            self._changed.notify_all()
