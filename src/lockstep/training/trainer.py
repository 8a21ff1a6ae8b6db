"""The training loop: batches in, steps launched by all hosts alike, hooks and metrics out."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from lockstep.hosts import Hosts, current, leader_only
from lockstep.placement import fsdp_warning, host_rows, make_mesh, place_local
from lockstep.report.trackers import NoopTracker, Tracker
from lockstep.training.config import TrainerConfig
from lockstep.training.hooks import Hook, Hooks, StepInfo
from lockstep.training.objectives.parts import LossFn
from lockstep.training.progress import make_progress
from lockstep.training.rows import Batches
from lockstep.training.step import BATCH_SPEC, STOP_SPEC, StepMetrics, TrainStep, init_model, init_state
from lockstep.training.stopping import StopRequest

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    model: PyTree
    """Parameters after the last step, in the parameter type and sharding."""
    completed_steps: int
    """Steps that were done."""
    loss: float
    """Of the last step; nan if there was none."""
    stopped_by: int | None
    """Signal on this or another host that ended the run early (0 where it was another's); None for a full run."""
    tracker_errors: int
    """Times the tracker failed; training went on."""


class Trainer:
    """Trains a model that is sharded over all devices; every host makes the same calls.

    Args:
        config: of the run.
        optimizer: what turns gradients into updates.
        loss_fn: the objective.
        hosts: of the job; None: the current ones.
        mesh: to train on; None: made from ``config.mesh_shape``.
        tracker: where metrics go; used by the leader alone.
        schedule: learning rate by completed steps, for the metrics.

    Raises:
        ConfigError: mesh or batch size do not fit the devices.
    """

    def __init__(
        self,
        config: TrainerConfig,
        optimizer: optax.GradientTransformation,
        loss_fn: LossFn,
        hosts: Hosts | None = None,
        *,
        mesh: Mesh | None = None,
        tracker: Tracker | None = None,
        schedule: optax.Schedule | None = None,
    ) -> None:
        self.config, self.hosts = config, current() if hosts is None else hosts
        self.mesh = make_mesh(config.mesh_shape) if mesh is None else mesh
        self.tracker = NoopTracker() if tracker is None else tracker
        self._optimizer, self._loss_fn, self._schedule = optimizer, loss_fn, schedule
        self._microbatches = config.microbatches(self.mesh)
        self._hooks = Hooks()
        self._step: TrainStep | None = None
        self._tracker_errors = 0
        self._warned_of_loss = False

    @property
    def train_step_traces(self) -> int:
        """How often the train step was traced; 1 after any number of steps."""
        return 0 if self._step is None else self._step.traces

    def add_hook(self, hook: Hook | Callable[..., Any], every: int = 1) -> None:
        """Have something called as training goes on, see `Hooks`.

        Args:
            hook: an object with ``on_step(info, force=False)``, or a function of the info.
            every: after each step whose number of completed steps is a multiple of this.

        Raises:
            ConfigError: it cannot be called, or ``every`` is below 1.
        """
        self._hooks.add(hook, every)

    def init_model(self, init: Callable[[jax.Array], PyTree]) -> PyTree:
        """Make a model from scratch, each device making only its part.

        Args:
            init: makes a model from a key.

        Returns:
            The model in the parameter type and sharding.
        """
        return init_model(init, self.config.seed, self.mesh, self.config.precision)

    def train(self, model: PyTree, batches: Batches) -> TrainResult:
        """Train for ``num_train_steps`` steps.

        Args:
            model: on the mesh; donated, use the result's model afterwards.
            batches: gives each host its rows of each batch.

        Returns:
            The trained model and how the run ended. A signal (Ctrl-C, SIGTERM) on any host ends the run after a step,
            the same on all hosts, without the forced last hooks.
        """
        config = self.config
        if self.hosts.is_leader and (warning := fsdp_warning(self.mesh)):
            log.warning(warning)
        state, shardings = init_state(model, self._optimizer, self.mesh, config.precision)
        del model
        self._step = step_fn = TrainStep(
            loss_fn=self._loss_fn,
            optimizer=self._optimizer,
            schedule=self._schedule,
            mesh=self.mesh,
            shardings=shardings,
            precision=config.precision,
            microbatches=self._microbatches,
        )
        info = StepInfo(step=-1, model=state.model, loss=math.nan, step_duration=0.0)
        stopped_by: int | None = None
        stop_arrays = [self._stop_array(flag) for flag in (0, 1)]
        progress = make_progress(config.num_train_steps, self.hosts.is_leader)
        with StopRequest() as stop, contextlib.closing(progress):
            self._hooks.before_first_step(info)
            for step in range(config.num_train_steps):
                batch = self._place(batches, step)
                start = time.perf_counter()
                state, figures = step_fn(state, batch, stop_arrays[stop.signal is not None])
                metrics = step_fn.read(figures)
                duration = time.perf_counter() - start
                info = StepInfo(step=step, model=state.model, loss=metrics.loss, step_duration=duration)
                progress.update(info.next_step, info.loss)
                self._log(info, metrics)
                if metrics.stop:
                    stopped_by = stop.signal or 0
                    break
                self._hooks.after_step(info)
            else:
                self._hooks.after_last_step(info)
        return TrainResult(
            model=state.model,
            completed_steps=info.next_step,
            loss=info.loss,
            stopped_by=stopped_by,
            tracker_errors=self._tracker_errors,
        )

    def _place(self, batches: Batches, step: int) -> dict[str, jax.Array]:
        n_rows = self.config.train_batch_size
        sharding = NamedSharding(self.mesh, BATCH_SPEC)
        local = batches.batch(step, n_rows, host_rows(sharding, n_rows))
        return {name: place_local(rows, sharding, n_rows) for name, rows in local.items()}

    def _stop_array(self, flag: int) -> jax.Array:
        """One number per device: this host's devices hold ``flag``."""
        sharding = NamedSharding(self.mesh, STOP_SPEC)
        n_local = len(sharding.addressable_devices)
        return place_local(np.full(n_local, flag, np.int32), sharding, self.mesh.size)

    def _log(self, info: StepInfo, metrics: StepMetrics) -> None:
        if not self.hosts.is_leader:
            return
        values = step_metrics(info, metrics, self.config.train_batch_size)
        with self._tracking():
            self.tracker.log(values, step=info.next_step)
        if not math.isfinite(info.loss) and not self._warned_of_loss:
            self._warned_of_loss = True
            log.warning("the loss is %s after %d steps; training goes on", info.loss, info.next_step)

    @contextlib.contextmanager
    def _tracking(self) -> Iterator[None]:
        """What a tracker does must neither launch a program nor end training on one host."""
        try:
            with leader_only():
                yield
        except Exception as error:
            self._tracker_errors += 1
            if self._tracker_errors == 1:
                log.error("the tracker failed; training goes on, later failures are only counted", exc_info=error)


def step_metrics(info: StepInfo, metrics: StepMetrics, batch_size: int) -> Mapping[str, float]:
    """Name the figures of a step as a tracker gets them.

    Args:
        info: of the step.
        metrics: of the step.
        batch_size: rows of the batch.

    Returns:
        ``train/…`` and ``throughput/…``, durations in seconds.
    """
    return {
        "train/loss": info.loss,
        **{f"train/{name}": value for name, value in metrics.values.items()},
        "throughput/step_duration_s": info.step_duration,
        "throughput/examples_per_s": batch_size / info.step_duration,
    }
