"""Ending a run on Ctrl-C or SIGTERM, at the same step on every host."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from lockstep.hosts.preemption import Preemption

AGAIN_AFTER_S = 1.0
"""A terminal and a launcher may both deliver the same Ctrl-C: what follows sooner than this is the same request."""


class StopRequest:
    """Notes a signal instead of dying at once, so that all hosts stop together.

    The train step spreads the note; during a round of samples the leader asks for it between launches. A second signal
    ends the process at once. Only the main thread can receive signals; elsewhere none is noted here.

    Args:
        preemption: of the job, where the signal is noted.
    """

    def __init__(self, preemption: Preemption) -> None:
        self._preemption = preemption
        self._at = 0.0
        self._before: dict[int, Any] = {}

    @property
    def signal(self) -> int | None:
        """The signal that asked this process to end, or None."""
        return self._preemption.signal

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._preemption.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._at == 0.0:
            self._at = time.monotonic()
            self._preemption.note(number)
        elif time.monotonic() - self._at > AGAIN_AFTER_S:
            # The step may hang in a device program that no exception can interrupt.
            os._exit(128 + number)
