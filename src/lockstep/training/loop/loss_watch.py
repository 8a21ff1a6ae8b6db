"""Steps whose loss is not a number, or far above those before it: the same reaction on every host.

Every host reads the same figures of a step, so all decide equally from them, without a word between them. The limit of
a loss is worked out on the hosts and is an argument of the next step, which leaves its state as it is where the limit
is passed.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

from lockstep.credentials import get_logger
from lockstep.errors import ConfigError, DivergenceError
from lockstep.json_text import typed
from lockstep.training.step.train_step import SKIPPED, StepMetrics

log = get_logger(__name__)

SKIPS_IN_A_ROW: Final = 50
"""The number of steps in a row that may be skipped: after more of them training would go on for nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpikeConfig:
    """When a loss counts as a spike, in the words of Levanter's ``skip_bad_steps``.

    Raises:
        ConfigError: A value is out of its range.
    """

    rolling_interval_length: int = 128
    """The number of last losses to compare with, spikes left out; until there are so many, no loss is a spike."""
    sigma_factor: float = 6.0
    """The number of standard deviations above their mean from which on a loss is a spike."""

    def __post_init__(self) -> None:
        if self.rolling_interval_length < 2:
            raise ConfigError(
                f"trainer.loss_spike.rolling_interval_length is {self.rolling_interval_length}; it must be at least 2, "
                "for one loss has no deviation. Raise it."
            )
        if not self.sigma_factor > 0:
            raise ConfigError(f"trainer.loss_spike.sigma_factor is {self.sigma_factor}; it must be above 0. Raise it.")


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
        self.skipped = 0
        """The number of steps whose update was left out."""
        self._in_a_row = 0

    @property
    def limit(self) -> float:
        """The largest loss that the next step may have; infinity where there is no limit."""
        if self._spike is None or len(self._losses) < self._spike.rolling_interval_length:
            return math.inf
        limit = statistics.fmean(self._losses) + self._spike.sigma_factor * statistics.pstdev(self._losses)
        return float(np.float32(limit))  # as the step on the devices compares it

    def judge(self, completed: int, metrics: StepMetrics, *, is_leader: bool) -> bool:
        """Take in the figures of a step.

        Args:
            completed: The number of completed steps, this one included.
            is_leader: Whether this process logs.

        Raises:
            DivergenceError: The step is bad and ``on_nan`` is ``raise``, or too many in a row were skipped; raised on
                every host.

        Returns:
            Whether all hosts stop now, the update of this step left out.
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
        """Go on from what `state` returned in an earlier process.

        Args:
            state: That state.
        """
        self._losses.clear()
        self._losses.extend(typed(list[float], state["losses"]) if self._spike is not None else [])
        self.skipped, self._in_a_row = typed(int, state["skipped"]), typed(int, state["in_a_row"])
