"""Samples inside a Levanter training run: one line beside its other hooks (docs/levanter.md)."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import levanter.tracker.wandb
from levanter.callbacks import Callback, ProgressEvent, progress_event_scope
from levanter.tracker import CompositeTracker

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig, Hosts
from lockstep.hosts import start as start_hosts
from lockstep.report import TableRow, WandbTracker


def start(config: Any) -> Hosts:
    """Join the job in Levanter's place, before ``levanter.trainer.initialize``. Every process makes the same call.

    Levanter's own start knows less: the launcher of this package, a wait with a limit, a peer that failed.

    Args:
        config: Levanter's ``TrainerConfig``; its ``distributed`` is then set so that Levanter starts nothing.

    Raises:
        ConfigError: The batch cannot be split over the devices, where Levanter ends in a ``ZeroDivisionError``; or one
            of the errors of `lockstep.start`.

    Example:
        >>> from levanter.trainer import TrainerConfig
        >>> config = TrainerConfig(train_batch_size=64)
        >>> hosts = lockstep.levanter.start(config)
        >>> config.distributed.initialize_jax_distributed
        False
    """
    asked = config.distributed
    if asked.local_device_ids is not None:
        raise ConfigError(
            f"trainer.distributed.local_device_ids is {asked.local_device_ids}; set JAX_LOCAL_DEVICE_IDS in the "
            "environment instead."
        )
    hosts = start_hosts(
        DistributedConfig(
            coordinator_address=asked.coordinator_address,
            num_processes=asked.num_processes,
            process_id=asked.process_id,
        )
    )
    config.distributed = dataclasses.replace(asked, initialize_jax_distributed=False)
    batch, devices = config.train_batch_size, config.data_axis_size
    if isinstance(batch, int) and batch != -1 and batch % devices:
        raise ConfigError(
            f"trainer.train_batch_size is {batch}, but each batch is split over {devices} devices. Set it to a "
            f"multiple of {devices}, such as {-(-batch // devices) * devices}, or split examples too (trainer.mesh)."
        )
    return hosts


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
    """Make a hook for ``trainer.add_hook(…, every=N)`` that shows what the model says. Every process makes one.

    Levanter's ``every`` is the schedule: a round runs after each step that it divides, and after the last step if
    ``config.at_end``; pass ``config.eval_every`` as ``every``: ``prompts_per_round`` deals by it. The model is the
    evaluation model (the averaged one where there is model averaging, the policy of a DPO model) in the trainer's
    compute dtype. The samples go to the trainer's trackers.

    Args:
        config: What to sample, and within which limits.
        tokenizer: Levanter's tokenizer, or a Hugging Face one.
        trainer: Levanter's ``Trainer``, after ``initialize``.
        model: The model that will be trained. With it, a model or prompts that cannot work are refused now; without it,
            after the first step.
        output_dir: The directory where process 0 appends to ``samples.jsonl``; None for no file.
        hosts: The processes of the job; None for the current ones.

    Raises:
        ConfigError: ``config.at_start`` is set, but Levanter calls no hook before the first step.
        PeerError: ``model`` was given, and it, the prompts or the capacities cannot work; raised on every process.

    Example:
        >>> import lockstep.levanter
        >>> config = lockstep.InferenceEvalConfig(prompts=["What is 12 plus 7?"], max_new_tokens=16)
        >>> hook = lockstep.levanter.sample_callback(config, tokenizer, trainer, model=state.model)
        >>> trainer.add_hook(hook, every=100)
    """
    return LevanterSampleCallback(
        config, tokenizer, trainer, model=model, name=name, output_dir=output_dir, hosts=hosts
    )


class LevanterSampleCallback(Callback):
    """The hook that `sample_callback` returns. It keeps no reference to a state or model."""

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
            config,
            tokenizer.as_hf_tokenizer() if hasattr(tokenizer, "as_hf_tokenizer") else tokenizer,
            tracker=LevanterTracker(trainer.tracker),
            name=name,
            output_dir=output_dir,
            hosts=hosts,
            dtype=jnp.dtype(trainer.mp.compute_dtype).name,
            every_call=True,
        )
        """The callback that runs the rounds, with its counters and its engine."""
        self._checked = False
        if model is not None:
            self.check(model)
        trainer.add_hook(self._check_first, every=1)

    def check(self, model: Any) -> None:
        """Find out now what would make a round fail. Every process makes this call; nothing is launched.

        Raises:
            PeerError: Something cannot work on at least one process; raised on every process with the same text.
        """
        self._checked = True
        self.sampler.check(model)

    def on_step(self, info: Any, force: bool = False) -> None:
        """Run a round if one is due. Levanter makes this call on every process.

        Args:
            info: Levanter's state after the step.
            force: Whether this is Levanter's last call, which it makes of every hook: a round runs if ``at_end`` is set
                and this step had none.
        """
        step = info.next_step
        config, done = self.sampler.config, step == self.sampler.last_step
        if force and self.sampler.tasks is not None:
            done = done and step == self.sampler.last_tasks
        if not config.enabled or done or (force and not config.at_end):
            if force:
                self.sampler.finish()
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
    Levanter's, which counts from 0. W&B gets a round in whatever history entry is open when its report is done:
    Levanter's own tracker refuses a step that it has passed.

    Example:
        >>> from lockstep.levanter import LevanterTracker
        >>> LevanterTracker(trainer.tracker).log({"reward": 0.5}, step=10)
    """

    def __init__(self, tracker: Any) -> None:
        self._wandb: list[WandbTracker] = []
        self._others: list[Any] = []
        for inner in _flat(tracker):
            wrapped = getattr(inner, "wrapped", inner)
            if isinstance(wrapped, levanter.tracker.wandb.WandbTracker):
                self._wandb.append(WandbTracker(wrapped.run, alone=False))
            else:
                self._others.append(inner)

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars in every tracker."""
        for tracker in self._others:
            tracker.log(dict(metrics), step=step - 1)
        for tracker in self._wandb:
            tracker.log(metrics, step=step)

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add the rows to the table in W&B; Levanter's other trackers have no tables."""
        for tracker in self._wandb:
            tracker.log_rows(name, rows, step=step)

    def alert(self, *, title: str, text: str, step: int) -> None:
        """Send a W&B alert; Levanter's other trackers have none."""
        for tracker in self._wandb:
            tracker.alert(title=title, text=text, step=step)

    def finish(self) -> None:
        """Do nothing: the trackers are the trainer's."""


def _flat(tracker: Any) -> list[Any]:
    """Return the trackers inside a composite one. A background tracker stays whole: its queue keeps the order."""
    if isinstance(tracker, CompositeTracker):
        return [leaf for inner in tracker.loggers for leaf in _flat(inner)]
    return [tracker]
