"""When a training loop saves, and how it goes on from a checkpoint."""

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, HostError
from lockstep.exits import ENDING
from lockstep.hosts import Hosts, is_everywhere
from lockstep.printable import get_logger
from lockstep.training.checkpoints.checkpoint import CheckpointMetadata
from lockstep.training.checkpoints.checkpointer import Checkpointer
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.loop.hooks import Hooks, StepInfo
from lockstep.training.loop.stopping import LossWatch
from lockstep.training.step.train_state import TrainState
from lockstep.training.step.train_step import SAVE_FLAG

log = get_logger(__name__)


class Saves:
    """The saves of one training loop. All is decided from the step and from what every host knows.

    Args:
        checkpointer: What saves; None: nothing is saved.
    """

    def __init__(
        self, checkpointer: Checkpointer | None, hooks: Hooks, watch: LossWatch, config: TrainerConfig, hosts: Hosts
    ) -> None:
        self._checkpointer, self._hooks, self._watch = checkpointer, hooks, watch
        self._config, self._hosts = config, hosts
        self._last_save = time.monotonic()
        self.resumed_from: CheckpointMetadata | None = None  # the checkpoint that the run goes on from; None: it begins
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
        checkpoint = self.resumed_from
        return checkpoint is not None and checkpoint.hooks_called and checkpoint.step >= self._config.num_train_steps

    def first_info(self, state: TrainState) -> StepInfo:
        """Return the info before the first step of this loop."""
        checkpoint = self.resumed_from
        step, loss = (0, math.nan) if checkpoint is None else (checkpoint.step, checkpoint.loss)
        return StepInfo(step=step - 1, model=state.model, loss=loss, step_duration=0.0, average=state.average)

    def begin(self, info: StepInfo) -> bool:
        """Call the hooks as before a first step, or those that a run which goes on has not called yet.

        Returns:
            Whether all were called; False: the job is asked to end, and the next start begins where this one did.
        """
        if self.resumed_from is None:
            return self._hooks.before_first_step(info)
        self._hooks.load_state(self.resumed_from.hooks)
        if self._watch.name in self.resumed_from.hooks:
            self._watch.load_state(self.resumed_from.hooks[self._watch.name])
        return self.resumed_from.hooks_called or self._hooks.after_step(info)

    def flag(self) -> int:
        """Return the stop flag of this host for the next step: the leader's asks for a save where time is up."""
        if self._checkpointer is None or self._checkpointer.config.every_minutes is None or not self._hosts.is_leader:
            return 0
        due_s = 60 * self._checkpointer.config.every_minutes
        return SAVE_FLAG if time.monotonic() - self._last_save >= due_s else 0

    def after_step(
        self, state: TrainState, info: StepInfo, *, hooks_called: bool, save_requested: bool = False
    ) -> None:
        """Begin a save where one is due.

        Args:
            hooks_called: Whether all hooks have done their work for this step; where one has not, because the job is
                asked to end, a resume has to begin here.
            save_requested: Whether the leader asked for a save with its flag for this step.
        """
        if self._checkpointer is None:
            return
        settings, step = self._checkpointer.config, info.next_step
        self._interrupted = not hooks_called and settings.save_on_preemption
        # The last one comes after the last hooks.
        due = save_requested or (settings.every is not None and step % settings.every == 0)
        if self._interrupted or (hooks_called and due and step < self._config.num_train_steps):
            self._save(state, info, hooks_called, signalled=self._interrupted, is_last=False)

    def end(
        self,
        state: TrainState,
        info: StepInfo,
        stopped_by: int | None,
        *,
        diverged: bool = False,
        between_steps: bool = False,
    ) -> None:
        """Save after the last step of this loop, unless a signal beside `ENDING` ended it; wait for what is written.

        Args:
            diverged: Whether ``on_nan`` or an alarm ended it, so that hooks have not been called for the last step.
            between_steps: Whether the signal ended it after the hooks of the last step.
        """
        if self._checkpointer is None:
            return
        preempted = stopped_by in ENDING and self._checkpointer.config.save_on_preemption
        with self._checkpointer.within_grace(info.next_step) if preempted else contextlib.nullcontext():
            if stopped_by is None:
                self._save(state, info, hooks_called=not diverged)
            elif preempted and not self._interrupted and info.next_step:
                self._save(state, info, hooks_called=between_steps, signalled=True)
            self._checkpointer.wait(removal=not preempted)

    @contextlib.contextmanager
    def completed(self) -> Iterator[None]:
        """Complete the save that is under way when an error that every process has ends the block."""
        try:
            yield
        except Exception as error:
            everywhere = self._hosts.count == 1 or (isinstance(error, HostError) and is_everywhere(self._hosts, error))
            if everywhere and self._checkpointer is not None and (save := self._checkpointer.pending) is not None:
                if self._hosts.is_leader:
                    log.warning("training has failed; it ends once the checkpoint of step %d is written", save.step)
                try:
                    self._checkpointer.wait()
                except Exception as second:  # the first error says why the run ends
                    log.warning("the checkpoint of step %d may not be complete: %s", save.step, second)
            raise

    def _save(
        self, state: TrainState, info: StepInfo, hooks_called: bool, *, signalled: bool = False, is_last: bool = True
    ) -> None:
        assert self._checkpointer is not None
        save = self._checkpointer.save_after_signal
        if not signalled:
            save = functools.partial(self._checkpointer.save, is_last=is_last)
        self._last_save = time.monotonic()
        hooks = self._hooks.state() | {self._watch.name: self._watch.state()}
        changing, _ = state.split()
        save(changing, step=info.next_step, loss=info.loss, hooks=hooks, hooks_called=hooks_called)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The directory of a run, and what its checkpoints say of it.

    Example:
        >>> lockstep.training.RunRecord(directory="runs/my-run", facts={"training data": "version 3"}).config
        {}
    """

    directory: str | os.PathLike[str] | None = None
    """The run directory, which a relative ``checkpointer.base_path`` is below; None: ``log_dir/run_id``."""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The facts that a run must have in common with a checkpoint to go on from it, such as a digest of its data, by
    name; seed, batch size and the shapes of all arrays are compared anyway."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The configuration of the run as JSON values: what has changed in it at a resume is logged."""
    model: Mapping[str, Any] | None = None
    """The model as `lockstep.training.model_spec` returns it, for ``lockstep export`` and ``lockstep sample``; None:
    only this program can read its checkpoints."""


def make_checkpointer(
    config: TrainerConfig, run: RunRecord, hosts: Hosts, *, reported: Callable[[], bool]
) -> Checkpointer | None:
    """Make the checkpointer that a configuration asks for; None where there are no checkpoints.

    Raises:
        ConfigError: There is no run directory.
    """
    if config.checkpointer is None:
        return None
    run_dir = directory_of_run(config, run.directory, "trainer.checkpointer is set, and a later start must find it")
    return Checkpointer(
        config.checkpointer,
        config.checkpointer.path(run_dir, run_dir.name),
        hosts,
        facts={"seed": str(config.seed), "train_batch_size": str(config.train_batch_size), **run.facts},
        run_config=run.config,
        reported=reported,
        model=run.model,
    )


def directory_of_run(config: TrainerConfig, run_dir: str | os.PathLike[str] | None, why: str) -> Path:
    """Return the directory of a run.

    Args:
        run_dir: The directory that was given; None: ``log_dir/run_id``.
        why: Why there must be one, for the error.

    Raises:
        ConfigError: It is not known.
    """
    if run_dir is not None:
        return Path(run_dir).absolute()
    if config.run_id is None:
        raise ConfigError(f"there is no run directory: neither run_dir nor trainer.run_id is given. {why}. Give one.")
    return Path(config.log_dir).absolute() / config.run_id
