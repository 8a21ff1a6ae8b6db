"""The end of a run: Ctrl-C or SIGTERM at the same step on every host, and the result."""

import dataclasses
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from jaxtyping import PyTree

from lockstep.hosts import Preemption

AGAIN_AFTER_S = 1.0
"""Seconds after a signal from which on another one is a second request: a terminal and a launcher may both deliver one
Ctrl-C."""


class StopRequest:
    """Notes a signal instead of ending the process at once, so that all hosts stop after the same step.

    The train step carries the signal to all hosts; during a round of samples they learn of it between two launches. A
    second signal ends the process at once. Only the main thread can receive signals; in another thread this does
    nothing.

    Args:
        preemption: The requests to end the job; the signal is noted there.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The end of a run."""

    model: PyTree
    """Parameters after the last step, in the parameter type and sharding."""
    completed_steps: int
    """Steps that were done."""
    loss: float
    """The loss of the last step; nan if there was none."""
    stopped_by: int | None
    """Signal that ended the run early, on whichever host it came; the same on all. None where there was none."""
    tracker_errors: int
    """Times the tracker failed; training went on."""
    checkpoint: str | None = None
    """The newest checkpoint of the run; None where there is none."""
    checkpoint_errors: int = 0
    """Checkpoints that could not be saved; training went on."""
    average: PyTree | None = None
    """The average of the parameters over the steps, where the optimizer keeps one (``optimizer.ema_decay``)."""
    skipped_steps: int = 0
    """Steps whose update was left out (``trainer.on_nan``)."""
    diverged: bool = False
    """Whether ``on_nan: stop`` ended the run; the model is then that before the bad step."""

    @property
    def eval_model(self) -> PyTree:
        """The model to evaluate and to export: the average where there is one, else ``model``."""
        return self.model if self.average is None else self.average
