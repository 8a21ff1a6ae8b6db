"""Ending a run on Ctrl-C or SIGTERM, at the same step on every host."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

AGAIN_AFTER_S = 1.0
"""A terminal and a launcher may both deliver the same Ctrl-C: what follows sooner than this is the same request."""


class StopRequest:
    """Notes a signal instead of dying at once; the train step spreads the note, so that all hosts stop together.

    A second signal ends the process at once. Only the main thread can receive signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

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

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = number, time.monotonic()
        elif time.monotonic() - self._at > AGAIN_AFTER_S:
            # The step may hang in a device program that no exception can interrupt.
            os._exit(128 + number)
