"""Sampling inside a Levanter training run: one line beside its other hooks (docs/levanter.md)."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from levanter.callbacks import Callback, ProgressEvent, progress_event_scope
from levanter.tracker import CompositeTracker
from levanter.tracker.wandb import WandbTracker

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts
from lockstep.report.rows import TableRow
from lockstep.report.trackers import WandbTables


def sample_callback(
    config: InferenceEvalConfig,
    tokenizer: Any,
    trainer: Any,
    *,
    model: Any = None,
    name: str = "inference_eval",
    output_dir: str | os.PathLike[str] | None = None,
    hosts: Hosts | None = None,
) -> "LevanterSampleCallback":
    """A hook for ``trainer.add_hook(…, every=N)`` that shows what the model says. Every process makes it alike.

    Levanter's ``every`` is the schedule: a round runs after each step that it divides, and after the last step if
    ``config.at_end``; ``config.eval_every`` is what to pass as ``every``. The model is the evaluation model (the
    averaged one where there is model averaging, the policy of a DPO model) in the trainer's compute dtype. The samples
    go to the trainer's trackers.

    Args:
        config: what to sample, and within which limits.
        tokenizer: Levanter's, or a Hugging Face tokenizer.
        trainer: Levanter's ``Trainer``, after ``initialize``.
        model: the model that will be trained. With it, a model or prompts that cannot work are refused now; without it,
            after the first step.
        name: prefix of the table and of the metrics.
        output_dir: where process 0 appends ``samples.jsonl``; None for no file.
        hosts: of the job; None: the current ones.

    Raises:
        ConfigError: ``config.at_start`` is set: Levanter calls no hook before the first step.
        PeerError: with ``model``: it, the prompts or the capacities cannot work; the same on every process.
    """
    return LevanterSampleCallback(
        config, tokenizer, trainer, model=model, name=name, output_dir=output_dir, hosts=hosts
    )


class LevanterSampleCallback(Callback):
    """What `sample_callback` returns; see there. It keeps no reference to a state or model."""

    def __init__(
        self,
        config: InferenceEvalConfig,
        tokenizer: Any,
        trainer: Any,
        *,
        model: Any,
        name: str,
        output_dir: str | os.PathLike[str] | None,
        hosts: Hosts | None,
    ) -> None:
        if config.enabled and config.at_start:
            raise ConfigError(
                "inference_eval.at_start is true, but Levanter calls no hook before the first step. Set it to false."
            )
        self.sampler = SampleCallback(
            dataclasses.replace(config, eval_every=1),
            tokenizer.as_hf_tokenizer() if hasattr(tokenizer, "as_hf_tokenizer") else tokenizer,
            tracker=LevanterTracker(trainer.tracker),
            name=name,
            output_dir=output_dir,
            hosts=hosts,
            dtype=jnp.dtype(trainer.mp.compute_dtype).name,
        )
        """The callback underneath: its counters, its engine."""
        self._checked = False
        if model is not None:
            self.check(model)
        trainer.add_hook(self._check_first, every=1)

    def check(self, model: Any) -> None:
        """Finds out now, alike on every process, what would make a round fail; launches nothing.

        Args:
            model: that will be sampled.

        Raises:
            PeerError: something cannot work on at least one process; the same text on every process.
        """
        self._checked = True
        self.sampler.check(model)

    def on_step(self, info: Any, force: bool = False) -> None:
        """Runs a round; called by Levanter on every process.

        Args:
            info: of the step.
            force: Levanter's last call, of every hook: run unless this step had its round, and ``at_end``.
        """
        step = info.next_step
        config = self.sampler.config
        if not config.enabled or step == self.sampler.last_step or (force and not config.at_end):
            if force:
                self.sampler.flush()
            return
        with progress_event_scope(info.emit_event, ProgressEvent.EVALUATION_STARTED, ProgressEvent.EVALUATION_FINISHED):
            self.sampler.on_step(_Step(step, info.eval_model), force=force)

    def _check_first(self, info: Any) -> None:
        if not self._checked:
            self.check(info.eval_model)


@dataclasses.dataclass(frozen=True)
class _Step:
    step: int
    model: Any


class LevanterTracker:
    """Levanter's trackers as `lockstep.report.Tracker`, called by process 0 alone.

    The trackers are called themselves: ``levanter.tracker.log`` asks first whether it is being traced, by way of
    ``jnp.zeros(())``, and under a global mesh that is a program on the devices of all processes. The step is
    Levanter's, which counts from 0; with ours, W&B would refuse what Levanter logs after its hooks.

    Args:
        tracker: the trainer's.
    """

    def __init__(self, tracker: Any) -> None:
        self._trackers = _flat(tracker)
        self._tables = WandbTables()

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars in every tracker."""
        for tracker in self._trackers:
            tracker.log(dict(metrics), step=step - 1)

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Log the table with all rows so far to W&B; Levanter's other trackers have no tables."""
        for tracker in self._trackers:
            if isinstance(getattr(tracker, "wrapped", tracker), WandbTracker):
                tracker.log({name: self._tables.add(name, rows)}, step=step - 1)

    def finish(self) -> None:
        """Do nothing: the trackers are the trainer's."""


def _flat(tracker: Any) -> list[Any]:
    """The trackers inside a composite one; a background tracker stays whole, so that its queue keeps the order."""
    if isinstance(tracker, CompositeTracker):
        return [each for inner in tracker.loggers for each in _flat(inner)]
    return [tracker]
