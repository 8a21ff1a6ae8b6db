"""The hooks of Tunix's trainers: when a round runs, on what, and the tracker of its samples."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Sharding
from metrax.logging import WandbBackend
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.sft.hooks import TrainingHooks
from tunix.sft.metrics_logger import MetricsLogger, Mode

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts
from lockstep.report import TableRow, WandbTracker
from lockstep.tunix.rollout import compute_dtype


class TunixTracker:
    """Tunix's metrics logger as `lockstep.report.Tracker`, called by process 0 alone, while training goes on.

    The logger gets the scalars as ``NAME/eval/…``, at the step that they belong to. W&B has passed that step by then
    and would drop them, so where the logger has a W&B run, its backends are called one by one, and W&B gets scalars and
    rows in whatever history entry is open.
    """

    def __init__(self) -> None:
        self._logger: MetricsLogger | None = None
        self._wandb: WandbTracker | None = None

    def use(self, logger: MetricsLogger) -> None:
        """Log to this logger from now on."""
        if logger is self._logger:
            return
        self._logger = logger
        runs = [backend.wandb.run for backend in logger._backends if isinstance(backend, WandbBackend)]
        self._wandb = WandbTracker(runs[0], alone=False) if runs and runs[0] is not None else None

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars; the logger has no place for texts."""
        assert self._logger is not None, "use() comes before log()"
        for name, value in metrics.items():
            if isinstance(value, str):
                continue
            prefix, _, own = name.partition("/")
            if self._wandb is None:
                self._logger.log(prefix, own, float(value), Mode.EVAL, step)
                continue
            for backend in self._logger._backends:
                if not isinstance(backend, WandbBackend):
                    backend.log_scalar(f"{prefix}/{Mode.EVAL}/{own}", float(value), step=step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add the rows to the table in W&B; Tunix's other backends have no tables."""
        if self._wandb is not None:
            self._wandb.log_rows(name, rows, step=step)

    def alert(self, *, title: str, text: str, step: int) -> None:
        """Send a W&B alert; Tunix's other backends have none."""
        if self._wandb is not None:
            self._wandb.alert(title=title, text=text, step=step)

    def finish(self) -> None:
        """Do nothing: the logger is the trainer's."""


def sample_hooks(
    config: InferenceEvalConfig,
    tokenizer: Any,
    *,
    also: TrainingHooks | None = None,
    model: Any = None,
    name: str = "inference_eval",
    output_dir: str | os.PathLike[str] | None = None,
    hosts: Hosts | None = None,
) -> "SampleHooks":
    """Make the hooks for ``trainer.with_training_hooks(…)`` that show what the model says. Every process makes them.

    For the SFT and DPO trainers, and for the actor of an RL cluster (``cluster.actor_trainer``). A step is an update of
    the model, so with gradient accumulation several of the trainer's iterations. Samples are taken in the dtype that
    the model computes in; they go to the trainer's metrics logger, and to the table of its W&B run.

    Args:
        config: When to sample, what, and within which limits.
        tokenizer: A Hugging Face tokenizer, or Tunix's adapter of one.
        also: Hooks of your own, for a Tunix trainer has one hooks object: each of its methods is called after ours.
        model: The model that will be trained. With it, a model or prompts that cannot work are refused now; without it,
            when training begins, before the first step.
        name: The prefix of the table and of the metrics.
        output_dir: The directory where process 0 appends to ``samples.jsonl``; None for no file.
        hosts: The processes of the job; None for the current ones.

    Raises:
        ConfigError: The tokenizer is not of Hugging Face.
        PeerError: ``model`` was given, and it, the prompts or the capacities cannot work; raised on every process.

    Example:
        >>> import lockstep.tunix
        >>> config = lockstep.InferenceEvalConfig(prompts=["What is 12 plus 7?"], max_new_tokens=16, eval_every=100)
        >>> trainer.with_training_hooks(lockstep.tunix.sample_hooks(config, tokenizer))
    """
    return SampleHooks(config, tokenizer, also=also, model=model, name=name, output_dir=output_dir, hosts=hosts)


class SampleHooks(TrainingHooks):
    """The hooks that `sample_hooks` returns. They keep no reference to a model."""

    def __init__(
        self,
        config: InferenceEvalConfig,
        tokenizer: Any,
        *,
        also: TrainingHooks | None,
        model: Any,
        name: str,
        output_dir: str | os.PathLike[str] | None,
        hosts: Hosts | None,
    ) -> None:
        self._also = also
        self._tracker = TunixTracker()
        self._make_sampler = functools.partial(
            SampleCallback,
            config,
            hugging_face(tokenizer),
            tracker=self._tracker,
            name=name,
            output_dir=output_dir,
            hosts=hosts,
        )
        self.sampler: SampleCallback | None = None
        """The callback that runs the rounds, with its counters and its engine; None before the model is known."""
        self._seen: int | None = None  # the last step after which a round could run
        self._resumed_at: int | None = None  # the step that the trainer resumed at, whose round was an earlier run's
        if model is not None:
            self.check(model)

    def check(self, model: Any) -> None:
        """Find out now what would make a round fail. Every process makes this call; nothing is launched.

        Raises:
            PeerError: Something cannot work on at least one process; raised on every process with the same text.
        """
        self.sampler = self._make_sampler(dtype=compute_dtype(model))
        self.sampler.check(model)

    def on_train_start(self, train_ctx: Any) -> None:
        """Check the model before the first step. In RL this is called at each update."""
        if self.sampler is None:
            self.check(train_ctx.model)
        self._tracker.use(train_ctx.metrics_logger)
        if self._seen is None and train_ctx.train_steps:
            self._seen = self._resumed_at = train_ctx.train_steps
        if train_ctx.is_managed_externally:
            self._finish_before_close(train_ctx)
        if self._also is not None:
            self._also.on_train_start(train_ctx)

    def on_train_step_start(self, train_ctx: Any) -> None:
        """Run the round of the step before, if one is due: ``on_train_step_end`` comes a step late."""
        self._after_step(train_ctx)
        if self._also is not None:
            self._also.on_train_step_start(train_ctx)

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        """Do nothing of ours."""
        if self._also is not None:
            self._also.on_train_step_end(train_ctx, train_step, train_loss)

    def on_eval_step_start(self, train_ctx: Any) -> None:
        """Do nothing of ours."""
        if self._also is not None:
            self._also.on_eval_step_start(train_ctx)

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        """Do nothing of ours."""
        if self._also is not None:
            self._also.on_eval_step_end(train_ctx, eval_loss)

    def on_train_end(self, train_ctx: Any) -> None:
        """Run the last round and wait for the reports; in RL, where this comes after each update, a round if due."""
        if train_ctx.is_managed_externally:
            self._after_step(train_ctx)
        else:
            self._finish(train_ctx)
        if self._also is not None:
            self._also.on_train_end(train_ctx)

    def _after_step(self, trainer: Any) -> None:
        if trainer.train_steps != self._seen:
            self._seen = trainer.train_steps
            self._sampler.on_step(_Step(trainer.train_steps, trainer.model))

    def _finish(self, trainer: Any) -> None:
        if trainer.train_steps == self._resumed_at:
            self._sampler.finish()
        else:
            self._sampler.on_step(_Step(trainer.train_steps, on_device(trainer.model)), force=True)

    def _finish_before_close(self, trainer: Any) -> None:
        """Have the trainer finish our rounds when it is closed: of the end of an RL run no hook is told."""
        close = trainer.close
        if getattr(close, "func", None) is _close:
            return
        trainer.close = functools.partial(_close, self._finish, trainer, close)

    @property
    def _sampler(self) -> SampleCallback:
        assert self.sampler is not None, "on_train_start comes first"
        return self.sampler


@dataclasses.dataclass(frozen=True)
class _Step:
    step: int
    model: Any


def _close(finish: Any, trainer: Any, close: Any) -> None:
    finish(trainer)
    close()


def on_device(model: nnx.Module) -> nnx.Module:
    """Return the model with its arrays in the devices' own memory: a learner that offloads has them in the host's."""
    graph, state = nnx.split(model)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    own_shardings = jax.tree.map(_in_own_memory, shardings)
    return model if own_shardings == shardings else nnx.merge(graph, jax.device_put(state, own_shardings))


def _in_own_memory(sharding: Sharding) -> Sharding:
    """The sharding in the default memory of its devices."""
    device: Any = next(iter(sharding.device_set))
    kind = device.default_memory().kind
    return sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)


def hugging_face(tokenizer: Any) -> Any:
    """The Hugging Face tokenizer that this is, or that Tunix's adapter holds."""
    inner = tokenizer.tokenizer if isinstance(tokenizer, TokenizerAdapter) else tokenizer
    if not hasattr(inner, "get_vocab"):
        raise ConfigError(
            f"the tokenizer is a {type(inner).__name__}; lockstep needs one of Hugging Face. Give it "
            "AutoTokenizer.from_pretrained(NAME) of the same model, whatever tokenizer the trainer has (docs/tunix.md)."
        )
    return inner
