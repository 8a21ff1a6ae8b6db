"""The end of a run, at the same step on every host: a signal, a loss that is not a number or a spike, an alarm; and the
result.

Every host reads the same figures of a step, so all judge its loss equally, without a word between them. The limit of a
loss is worked out on the hosts and is an argument of the next step, which leaves its state as it is above the limit.
"""

import collections
import dataclasses
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
from jaxtyping import PyTree

from lockstep.config_fields import check_fields
from lockstep.errors import DivergenceError, HostError, check_at_least
from lockstep.exits import ENDING
from lockstep.hosts import Hosts
from lockstep.json_text import typed
from lockstep.printable import get_logger, printable
from lockstep.training.step.train_step import ALARM_FLAG, SIGNAL_FLAG, SKIPPED, SLOW_FLAG, StepMetrics

SLOW_STEP_S = 2.0
"""Seconds of a step above which a signal ends the run after the step that it came in, and not after the next."""
SIGNALS = (signal.SIGINT, *ENDING)
"""The signals that end a run in order. Another number from another process would be another exit code, 0 even."""
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
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # SIGHUP under nohup, SIGINT behind a shell's &
                    self._before[number] = signal.signal(number, self._note)
            self._preemption.in_order = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._preemption.in_order = False
        self._preemption.clear()

    def flag(self, leaders: int, stop_reason: str | None = None) -> int:
        """Return the stop flag of this host for the next step.

        Args:
            leaders: The flags of the leader beside `SLOW_FLAG` and `ALARM_FLAG`; 0 on other hosts.
            stop_reason: Why an alarm ends the run, on the leader; None where none does.
        """
        if self.signal is not None:
            return SIGNAL_FLAG * self.signal
        if stop_reason is not None and self._hosts.is_leader:
            leaders |= ALARM_FLAG
        return leaders | SLOW_FLAG if self._slow and self._hosts.is_leader else leaders

    def after_step(self, metrics: StepMetrics, step_s: float) -> int | None:
        """Return the signal that ends the run after this step, on whichever host it came; None where there is none.

        After a step that the leader expected to be slow, by the one before, the hosts ask each other: one barrier.
        """
        self._slow = step_s > SLOW_STEP_S
        if metrics.stop or not metrics.slow:
            return _of_hosts([metrics.stop or None])
        reason = None if self.signal is None else str(int(self.signal))
        reasons = self._hosts.reasons_to_stop("end of a slow step", None, reason)
        return _of_hosts([int(text) if text.isdecimal() and len(text) < 4 else text for text in reasons])

    def between_steps(self) -> int:
        """Return the signal that ended the run while a batch was made, on whichever host it came."""
        with self._hosts.run_on_all("end of the run") as ended:
            ended.share(int(self.signal or 0))
        return _of_hosts([number or None for number in ended.shared]) or signal.SIGTERM

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._at == 0.0:
            self._at = time.monotonic()
            self._preemption.note(number)
        elif time.monotonic() - self._at > AGAIN_AFTER_S:
            # The step may hang in a device program that no exception can interrupt.
            os._exit(128 + number)


def _of_hosts(numbers: Sequence[object]) -> int | None:
    """The signal that hosts were asked to end by; None where none was."""
    if strange := [number for number in numbers if number is not None and number not in SIGNALS]:
        raise HostError(
            f"another process was asked to end by {printable(repr(strange[0]))[:80]}; a run ends in order after "
            f"{', '.join(number.name for number in SIGNALS)} alone. If every process is of the same version, somebody "
            "else has written to the coordination service (docs/security.md)."
        )
    return max((number for number in SIGNALS if number in numbers), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The end of a run."""

    model: PyTree  # parameters after the last step, in the parameter type and sharding
    completed_steps: int  # steps that were done
    loss: float  # the loss of the last step; nan if there was none
    progress: str = ""  # the words of the source of the batches where the loss says little, as that of GRPO does
    stopped_by: int | None
    """Signal that ended the run early, on whichever host it came; the same on all. None where there was none."""
    tracker_errors: int  # times the tracker failed; training went on
    checkpoint: str | None = None  # the newest checkpoint of the run; None where there is none
    checkpoint_errors: int = 0  # checkpoints that could not be saved; training went on
    average: PyTree | None = None
    """The average of the parameters over the steps, where the optimizer keeps one (``optimizer.ema_decay``)."""
    skipped_steps: int = 0  # steps whose update was left out (`trainer.on_nan`)
    diverged: bool = False  # whether `on_nan: stop` ended the run; the model is then that before the bad step
    alarmed: bool = False  # whether an alarm ended the run (`alarms.on_alarm`)

    @property
    def eval_model(self) -> PyTree:
        """The model to evaluate and to export: the average where there is one, else ``model``."""
        return self.model if self.average is None else self.average

    @property
    def exit_code(self) -> int:
        """The exit code of a command that trains: 0, 128 + signal where one ended it, 1 where ``on_nan`` or an alarm
        did.
        """
        return int(self.diverged or self.alarmed) if self.stopped_by is None else 128 + self.stopped_by

    @property
    def complete(self) -> bool:
        """Whether nothing ended the run before its last step."""
        return self.stopped_by is None and not self.diverged and not self.alarmed


log = get_logger(__name__)

SKIPS_IN_A_ROW: Final = 50
"""The number of steps in a row that may be skipped: after more of them training would go on for nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpikeConfig:
    """When a loss counts as a spike, in the words of Levanter's ``skip_bad_steps``."""

    rolling_interval_length: int = 128
    """The number of last losses to compare with, spikes left out; until there are so many, no loss is a spike."""
    sigma_factor: float = 6.0
    """The number of standard deviations above their mean from which on a loss is a spike."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer.loss_spike.")
        fix = ", for one loss has no deviation. Raise it."
        check_at_least(self, 2, "rolling_interval_length", block="trainer.loss_spike.", fix=fix)
        check_at_least(self, 0, "sigma_factor", block="trainer.loss_spike.", above=True)


class LossWatch:
    """Judges the loss of each step. Its state is the same on every host and belongs into a checkpoint.

    Args:
        on_nan: What becomes of a bad step: all hosts raise, or skip it, or stop before it.
        spike: When a finite loss is bad too; None: never.
    """

    name = "loss_watch"

    def __init__(self, on_nan: Literal["raise", "skip", "stop"], spike: LossSpikeConfig | None) -> None:
        self._on_nan, self._spike = on_nan, spike
        self._losses: collections.deque[float] = collections.deque(
            maxlen=None if spike is None else spike.rolling_interval_length
        )
        self.skipped = 0  # the number of steps whose update was left out
        self._in_a_row = 0

    @property
    def limit(self) -> float:
        """The largest loss that the next step may have; infinity where there is no limit."""
        if self._spike is None or len(self._losses) < self._spike.rolling_interval_length:
            return math.inf
        limit = statistics.fmean(self._losses) + self._spike.sigma_factor * statistics.pstdev(self._losses)
        return float(np.float32(limit))  # as the step on the devices compares it

    def judge(self, completed: int, metrics: StepMetrics, *, is_leader: bool) -> bool:
        """Take in the figures of a step; return whether all hosts stop now, the update of this step left out.

        Raises:
            DivergenceError: The step is bad and ``on_nan`` is ``raise``, or too many in a row were skipped; raised on
                every host.
        """
        loss, grad_norm, limit = metrics.loss, metrics.values["grad_norm"], self.limit
        bad = metrics.values.get(SKIPPED)
        if bad is None:  # the step went on whatever its loss
            bad = not (math.isfinite(loss) and math.isfinite(grad_norm) and loss <= limit)
        if not bad:
            self._in_a_row = 0
            if self._spike is not None:
                self._losses.append(loss)
            return False
        why = f"step {completed} has loss {loss:g} and gradient norm {grad_norm:g}"
        if math.isfinite(loss) and math.isfinite(grad_norm):
            why += f"; the limit of a loss is {limit:g} (trainer.loss_spike)"
        if self._on_nan == "raise":
            raise DivergenceError(
                f"{why}. Lower optimizer.learning_rate or look at the rows of this step; trainer.on_nan: skip leaves "
                "such an update out and goes on, and a run with checkpoints goes on from the last one."
            )
        self.skipped += 1
        self._in_a_row += 1
        if self._on_nan == "skip" and self._in_a_row > SKIPS_IN_A_ROW:
            raise DivergenceError(
                f"{why}, and the {SKIPS_IN_A_ROW} steps before it were bad too: training would go on for nothing. "
                "Lower optimizer.learning_rate, or start from an earlier checkpoint."
            )
        if is_leader:
            then = "training stops" if self._on_nan == "stop" else f"training goes on ({self.skipped} skipped so far)"
            log.warning("%s; the update is left out and %s", why, then)
        return self._on_nan == "stop"

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on has to know; the same on every host."""
        return {"losses": list(self._losses), "skipped": self.skipped, "in_a_row": self._in_a_row}

    def reset(self) -> None:
        """Forget everything: a run begins."""
        self.load_state({"losses": [], "skipped": 0, "in_a_row": 0})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned in an earlier process."""
        self._losses.clear()
        self._losses.extend(typed(list[float], state["losses"]) if self._spike is not None else [])
        self.skipped, self._in_a_row = typed(int, state["skipped"]), typed(int, state["in_a_row"])
