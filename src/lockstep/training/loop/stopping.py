"""The end of a run: Ctrl-C or SIGTERM at the same step on every host, and the result."""

import dataclasses
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from jaxtyping import PyTree

from lockstep.hosts import Hosts
from lockstep.training.step.train_step import SIGNAL_FLAG, SLOW_FLAG, StepMetrics

SLOW_STEP_S = 2.0
"""Seconds of a step above which a signal ends the run after the step that it came in, and not after the next."""
AGAIN_AFTER_S = 1.0
"""Seconds after a signal from which on another one is a second request: a terminal and a launcher may both deliver one
Ctrl-C."""


class StopRequest:
    """Notes a signal instead of ending the process at once, so that all hosts stop after the same step.

    The next train step carries the signal to all hosts; where steps are slow, an exchange after each does. During a
    round of samples they learn of it between two launches. A second signal ends the process at once. Only the main
    thread can receive signals; in another thread this does nothing.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._preemption = hosts, hosts.preemption
        self._slow = True  # until a step has been measured
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

    def flag(self, leaders: int) -> int:
        """Return the stop flag of this host for the next step.

        Args:
            leaders: The flags of the leader beside `SLOW_FLAG`; 0 on other hosts.
        """
        if self.signal is not None:
            return SIGNAL_FLAG * self.signal
        return leaders | SLOW_FLAG if self._slow and self._hosts.is_leader else leaders

    def after_step(self, metrics: StepMetrics, step_s: float) -> int | None:
        """Return the signal that ends the run after this step, on whichever host it came; None where there is none.

        After a step that the leader expected to be slow, by the one before, the hosts ask each other: one barrier.
        """
        self._slow = step_s > SLOW_STEP_S
        if metrics.stop or not metrics.slow:
            return metrics.stop or None
        reason = None if self.signal is None else str(self.signal)
        return max(map(int, self._hosts.reasons_to_stop("end of a slow step", None, reason)), default=None)

    def between_steps(self) -> int:
        """Return the signal that ended the run while a batch was made, on whichever host it came."""
        with self._hosts.run_on_all("end of the run") as ended:
            ended.share(self.signal or 0)
        return max(ended.shared) or signal.SIGTERM

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

    @property
    def exit_code(self) -> int:
        """The exit code of a command that trains: 0, 128 + signal where one ended it, 1 where ``on_nan`` did."""
        return int(self.diverged) if self.stopped_by is None else 128 + self.stopped_by
