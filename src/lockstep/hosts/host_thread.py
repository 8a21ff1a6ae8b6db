"""A thread in which a host does work of its own, while its main thread stays in touch with the other hosts."""

import abc
import threading
import time
from typing import Self

from lockstep.errors import HostTimeoutError

STOP_S = 5.0
"""Seconds that a thread has to end when its work is given up."""


class Stopped(Exception):
    """The work was given up; nobody sees this but the thread."""


class HostThread(abc.ABC):
    """A context manager that works in a thread; after the context it does nothing more.

    The thread ends with the context, at its next step, which is waited for some seconds; it does not keep the
    interpreter alive.

    Args:
        name: The name of the thread.
        timeout_s: The seconds in which a step must end.
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
        """Wait until the work is done, or for some seconds.

        Args:
            timeout_s: The most seconds to wait.

        Returns:
            Whether it is done.

        Raises:
            HostTimeoutError: No step has ended for the thread's ``timeout_s``.
            Exception: What the work raised.
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
