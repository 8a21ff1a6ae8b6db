"""When a training loop saves, and how it goes on from a checkpoint."""

import contextlib
import math
import signal
import time

from lockstep.hosts import Hosts
from lockstep.training.checkpoint import CheckpointMetadata
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.config import TrainerConfig
from lockstep.training.hooks import Hooks, StepInfo
from lockstep.training.step import SAVE_FLAG, TrainState


class Saves:
    """The saves of one training loop. All is decided from the step and from what every host knows.

    Args:
        checkpointer: What saves; None: nothing is saved.
        hooks: The hooks of the run, whose states belong into a checkpoint.
        config: The configuration of the run.
        hosts: The processes of the job.
    """

    def __init__(self, checkpointer: Checkpointer | None, hooks: Hooks, config: TrainerConfig, hosts: Hosts) -> None:
        self._checkpointer, self._hooks, self._config, self._hosts = checkpointer, hooks, config, hosts
        self._last_save = time.monotonic()
        self.resumed_from: CheckpointMetadata | None = None
        """Where the run goes on from; None: it begins."""
        self._interrupted = False

    @property
    def newest(self) -> str | None:
        """The directory of the newest checkpoint of the run; None where there is none."""
        checkpointer = self._checkpointer
        if checkpointer is None or checkpointer.last_step is None:
            return None
        return str(checkpointer.directory.of(checkpointer.last_step))

    @property
    def errors(self) -> int:
        """The number of saves that failed."""
        return 0 if self._checkpointer is None else self._checkpointer.errors

    @property
    def complete(self) -> bool:
        """Whether the run goes on from a checkpoint after which nothing is left to do."""
        found = self.resumed_from
        return found is not None and found.hooks_called and found.step >= self._config.num_train_steps

    def first_info(self, state: TrainState) -> StepInfo:
        """Return the info before the first step of this loop.

        Args:
            state: The first state.
        """
        found = self.resumed_from
        step, loss = (0, math.nan) if found is None else (found.step, found.loss)
        return StepInfo(step=step - 1, model=state.model, loss=loss, step_duration=0.0)

    def begin(self, info: StepInfo) -> None:
        """Call the hooks as before a first step, or those that a run which goes on has not called yet.

        Args:
            info: What `first_info` returned.
        """
        if self.resumed_from is None:
            self._hooks.before_first_step(info)
            return
        self._hooks.load_state(self.resumed_from.hooks)
        if not self.resumed_from.hooks_called:
            self._hooks.after_step(info)

    def flag(self) -> int:
        """Return the stop flag of this host for the next step: the leader's asks for a save where time is up."""
        if self._checkpointer is None or self._checkpointer.config.every_minutes is None or not self._hosts.is_leader:
            return 0
        due_s = 60 * self._checkpointer.config.every_minutes
        return SAVE_FLAG if time.monotonic() - self._last_save >= due_s else 0

    def after_step(self, state: TrainState, info: StepInfo, *, hooks_called: bool, asked: bool = False) -> None:
        """Begin a save where one is due.

        Args:
            state: The state after the step.
            info: The info of the step.
            hooks_called: Whether all hooks have done their work for this step; where one has not, because the job is
                asked to end, a resume has to begin here.
            asked: Whether the leader asked for a save with its flag for this step.
        """
        if self._checkpointer is None:
            return
        settings, step = self._checkpointer.config, info.next_step
        self._interrupted = not hooks_called and settings.save_on_preemption
        # The last one comes after the last hooks.
        due = asked or (settings.every is not None and step % settings.every == 0)
        if self._interrupted or (hooks_called and due and step < self._config.num_train_steps):
            self._save(state, info, hooks_called)

    def end(self, state: TrainState, info: StepInfo, stopped_by: int | None) -> None:
        """Save after the last step, or after the one at which SIGTERM ended the run, and wait until all is written.

        Args:
            state: The last state.
            info: The info of the last step.
            stopped_by: The signal that ended the run, or None.
        """
        if self._checkpointer is None:
            return
        preempted = stopped_by == signal.SIGTERM and self._checkpointer.config.save_on_preemption
        with self._checkpointer.within_grace(info.next_step) if preempted else contextlib.nullcontext():
            if stopped_by is None or (preempted and not self._interrupted):
                self._save(state, info, hooks_called=stopped_by is None)
            self._checkpointer.wait()

    def _save(self, state: TrainState, info: StepInfo, hooks_called: bool) -> None:
        assert self._checkpointer is not None
        self._last_save = time.monotonic()
        self._checkpointer.save(
            state, step=info.next_step, loss=info.loss, hooks=self._hooks.state(), hooks_called=hooks_called
        )
