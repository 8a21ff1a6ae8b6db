"""The training loop: batches in, the same steps launched by every host, hooks and metrics out."""

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from lockstep.device import Program, compile_program
from lockstep.errors import ConfigError, HostError
from lockstep.hosts import Hosts, Watchdog, current, environment, leader_only
from lockstep.placement import fsdp_warning, host_rows, make_mesh, place_local
from lockstep.report import FINISH_S, BackgroundTracker, NoopTracker, Tracker
from lockstep.training.checkpoint import CheckpointMetadata
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.config import TrainerConfig
from lockstep.training.hooks import Hook, Hooks, StepInfo
from lockstep.training.objectives.parts import LossFn
from lockstep.training.progress_bar import make_progress
from lockstep.training.rows import Batches
from lockstep.training.saves import Saves
from lockstep.training.step import (
    BATCH_SPEC,
    STOP_SPEC,
    StepMetrics,
    TrainState,
    TrainStep,
    init_model,
    init_state,
    parameter_shardings,
    state_structs,
)
from lockstep.training.stopping import StopRequest

log = logging.getLogger(__name__)

STOPPED_FLUSH_S = 2.0
"""Seconds that a tracker has to take what is left when a signal ended the run: little time remains for a save."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    model: PyTree
    """Parameters after the last step, in the parameter type and sharding."""
    completed_steps: int
    """Steps that were done."""
    loss: float
    """The loss of the last step; nan if there was none."""
    stopped_by: int | None
    """Signal that ended the run early, on whichever host it came; the same on all. None for a full run."""
    tracker_errors: int
    """Times the tracker failed; training went on."""
    checkpoint: str | None = None
    """The newest checkpoint of the run; None where there is none."""
    checkpoint_errors: int = 0
    """Checkpoints that could not be saved; training went on."""


class Trainer:
    """Trains a model that is sharded over all devices; every host makes the same calls.

    Args:
        config: The configuration of the run.
        optimizer: The transformation that turns gradients into updates.
        loss_fn: The objective.
        hosts: The processes of the job; None for the current ones.
        mesh: The mesh to train on; None to make it from ``config.mesh_shape``.
        tracker: The tracker that metrics go to; used by the leader alone, from a thread of its own behind a bounded
            queue, so that it may be slow. It stays the caller's to finish. A `BackgroundTracker` is used as it is.
        schedule: The learning rate by completed steps, for the metrics.
        run_dir: The run directory, which a relative ``checkpointer.base_path`` is below; None: ``log_dir/run_id``.
        facts: What a run must have in common with a checkpoint to go on from it, such as a digest of its data, by name;
            seed, batch size and the shapes of all arrays are compared anyway.
        run_config: The configuration of the run as JSON values: what has changed in it at a resume is logged.

    Raises:
        ConfigError: The mesh or the batch size does not fit the devices, or there is a checkpointer without a run
            directory.
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
        run_dir: str | os.PathLike[str] | None = None,
        facts: Mapping[str, str] | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.hosts = config, current() if hosts is None else hosts
        self.mesh = make_mesh(config.mesh_shape) if mesh is None else mesh
        self.tracker: Tracker = NoopTracker() if tracker is None else tracker
        """Safe to call from any thread; give a `SampleCallback` this one, so that both share its queue."""
        self._queue: BackgroundTracker | None = None
        if tracker is not None and not isinstance(tracker, BackgroundTracker):
            self.tracker = self._queue = BackgroundTracker(tracker, leader_only)
        self._optimizer, self._loss_fn, self._schedule = optimizer, loss_fn, schedule
        self._microbatches = config.microbatches(self.mesh)
        self._hooks = Hooks()
        self._step: TrainStep | None = None
        self._watchdog = Watchdog(self.hosts, self.hosts.timeout_s)
        self._warned_of_loss = False
        self._checkpointer = self._make_checkpointer(run_dir, facts or {}, run_config or {})
        self._saves = Saves(self._checkpointer, self._hooks, config)

    @property
    def train_step_traces(self) -> int:
        """How often the train step was traced; 1 after any number of steps."""
        return 0 if self._step is None else self._step.traces

    @property
    def resumed_from(self) -> CheckpointMetadata | None:
        """The checkpoint that `restore` read; None where there was none."""
        return self._saves.resumed_from

    def add_hook(self, hook: Hook | Callable[..., Any], every: int = 1) -> None:
        """Have something called as training goes on, see `Hooks`.

        Args:
            hook: An object with ``on_step(info, force=False)``, or a function of the info.
            every: The number of completed steps between two calls.

        Raises:
            ConfigError: The hook cannot be called, or ``every`` is below 1.
        """
        self._hooks.add(hook, every)

    def init_model(self, init: Callable[[jax.Array], PyTree]) -> PyTree:
        """Make a model from scratch, each device making only its part.

        Args:
            init: A function that makes a model from a key.

        Returns:
            The model in the parameter type and sharding.
        """
        return init_model(init, self.config.seed, self.mesh, self.config.precision, self._launch)

    def restore(self, init: Callable[[jax.Array], PyTree]) -> TrainState | None:
        """Read the newest checkpoint of this run, into the shardings of this mesh, whatever those of the run were.

        Args:
            init: A function that makes a model from a key; only the shapes of its result are used.

        Raises:
            PeerError: The checkpoint cannot be read or does not fit this run, or ``resume`` is ``must`` and there is
                none, or ``never`` and there is one.

        Returns:
            The state to pass to `train`; None where there is nothing to go on from.
        """
        if self._checkpointer is None:
            return None
        metadata = self._checkpointer.find(self.config.resume)
        if metadata is None:
            return None
        structs, _ = state_structs(init, self._optimizer, self.mesh, self.config.precision)
        state = self._checkpointer.restore(metadata, structs)
        self._saves.resumed_from = metadata
        return state

    def train(self, model: PyTree | TrainState, batches: Batches) -> TrainResult:
        """Train until ``num_train_steps`` steps are done.

        Args:
            model: The model, sharded over the mesh, to train from the beginning; or the state that `restore` returned,
                to go on from its step. Donated: use the result's model afterwards.
            batches: What gives each host its rows of each batch.

        Raises:
            PeerError: The train step does not compile on some host; raised on every host.
            DisagreementError: The hosts compiled different train steps, or with different versions or flags.
            LaunchMismatchError: The hosts launched different programs; found at the end, or in debug mode before the
                launch.
            HostError: A step failed while it ran on several hosts, most likely because one of them has died.
            ConfigError: The state is not one that this trainer has restored.

        Returns:
            The trained model and how the run ended. A signal (Ctrl-C, SIGTERM) on any host ends the run after a step,
            the same on all hosts, without the forced last hooks; one that comes while the train step is compiled ends
            it after the first step.
        """
        with StopRequest(self.hosts.preemption) as stop:
            return self._train(model, batches, stop)

    def _train(self, model: PyTree | TrainState, batches: Batches, stop: StopRequest) -> TrainResult:
        config = self.config
        if self.hosts.is_leader and (warning := fsdp_warning(self.mesh)):
            log.warning(warning)
        if isinstance(model, TrainState):
            if self._saves.resumed_from is None:
                raise ConfigError(
                    "train() was given a state that this trainer has not restored, so its step is not known. Pass the "
                    "result of this trainer's restore(), or a model."
                )
            state, shardings = model, parameter_shardings(model, self.mesh)
        else:
            state, shardings = init_state(model, self._optimizer, self.mesh, config.precision, self._launch)
            self._saves.resumed_from = None
        del model
        step_fn = self._compile(state, shardings, batches)
        info = self._saves.first_info(state)
        stopped_by: int | None = None
        progress = make_progress(config.num_train_steps, self.hosts.is_leader)
        # A launch from a second thread could come before the train step on one host and after it on another.
        with contextlib.closing(progress), jax.thread_guard(True):
            self._saves.begin(info)
            for step in range(info.next_step, config.num_train_steps):
                batch = self._place(batches, step)
                start = time.perf_counter()
                with self._named_failure(step), self._watchdog.watch("train_step"):
                    state, figures = step_fn(state, batch, self._stop_array(stop.signal or 0))
                    metrics = step_fn.read(figures)
                duration = time.perf_counter() - start
                info = StepInfo(step=step, model=state.model, loss=metrics.loss, step_duration=duration)
                progress.update(info.next_step, info.loss)
                self._log(info, metrics)
                if metrics.stop:
                    stopped_by = metrics.stop
                    self._hooks.after_signal()
                    break
                self._saves.after_step(state, info, hooks_called=self._hooks.after_step(info))
            else:
                if not self._saves.complete:
                    self._hooks.after_last_step(info)
            self._saves.end(state, info, stopped_by)
            self._flush_tracker(min(FINISH_S, self.hosts.timeout_s / 2) if stopped_by is None else STOPPED_FLUSH_S)
            with self.hosts.launch_on_all("end of training"):
                pass  # every launch of the run has been made: they are compared
        return TrainResult(
            checkpoint=self._saves.newest,
            checkpoint_errors=self._saves.errors,
            model=state.model,
            completed_steps=info.next_step,
            loss=info.loss,
            stopped_by=stopped_by,
            tracker_errors=self.tracker.errors if isinstance(self.tracker, BackgroundTracker) else 0,
        )

    @contextlib.contextmanager
    def _named_failure(self, step: int) -> Iterator[None]:
        """What a collective says of a dead peer does not say that: here the user reads what to look for."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if self.hosts.count == 1:
                raise
            raise HostError(
                f"the train step after {step} steps failed on process {self.hosts.index} of {self.hosts.count}."
                f"{self.hosts.missing()} If the runtime speaks of a connection, a peer or a time-out, another process "
                f"has died: look for the log that ends without an error. The runtime says: {error}"
            ) from error

    def _compile(self, state: TrainState, shardings: PyTree, batches: Batches) -> TrainStep:
        """The train step, compiled and agreed on by every host; nobody launches it before all are ready."""
        step_fn = TrainStep(
            loss_fn=self._loss_fn,
            optimizer=self._optimizer,
            schedule=self._schedule,
            mesh=self.mesh,
            shardings=shardings,
            precision=self.config.precision,
            microbatches=self._microbatches,
        )
        arguments = state, self._place(batches, 0), self._stop_array(0)
        self._compile_on_all("train_step", lambda: step_fn.compile(*arguments, self.hosts.ledger))
        self._step = step_fn
        return step_fn

    def _compile_on_all(self, name: str, compile: Callable[[], Mapping[str, str]]) -> None:
        """Have every host compile a program, agree on its digests, and wait until all are ready to launch it."""
        with self.hosts.scope(name) as scope, scope.run_on_all(f"compiling {name}") as phase:
            phase.agree(environment() | {"debug": str(scope.debug)})
            phase.agree(compile())
        self.hosts.phase("training")

    def _launch(self, name: str, function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Any:
        """Compile, agree, launch once, wait; see `lockstep.training.step.Launch`."""
        programs: list[Program] = []

        def compile() -> Mapping[str, str]:
            ledger = self.hosts.ledger
            programs.append(compile_program(name, function, arguments, mesh=self.mesh, ledger=ledger, **options))
            return programs[0].digests

        self._compile_on_all(name, compile)
        with self._watchdog.watch(name):
            return jax.block_until_ready(programs[0](*arguments))

    def _place(self, batches: Batches, step: int) -> dict[str, jax.Array]:
        n_rows = self.config.train_batch_size
        sharding = NamedSharding(self.mesh, BATCH_SPEC)
        local = batches.batch(step, n_rows, host_rows(sharding, n_rows))
        return {name: place_local(rows, sharding, n_rows) for name, rows in local.items()}

    def _stop_array(self, flag: int) -> jax.Array:
        """One number per device: this host's devices hold ``flag``, a signal or 0."""
        sharding = NamedSharding(self.mesh, STOP_SPEC)
        n_local = len(sharding.addressable_devices)
        return place_local(np.full(n_local, flag, np.int32), sharding, self.mesh.size)

    def _log(self, info: StepInfo, metrics: StepMetrics) -> None:
        if not self.hosts.is_leader:
            return
        values = step_metrics(info, metrics, self.config.train_batch_size)
        self.tracker.log(values, step=info.next_step)
        if not math.isfinite(info.loss) and not self._warned_of_loss:
            self._warned_of_loss = True
            log.warning("the loss is %s after %d steps; training goes on", info.loss, info.next_step)

    def _make_checkpointer(
        self, run_dir: str | os.PathLike[str] | None, facts: Mapping[str, str], run_config: Mapping[str, Any]
    ) -> Checkpointer | None:
        config = self.config
        if config.checkpointer is None:
            return None
        if run_dir is None:
            if config.run_id is None:
                raise ConfigError(
                    "trainer.checkpointer is set, but neither run_dir nor trainer.run_id is given, so a later start "
                    "would not find the checkpoints. Give one of them."
                )
            run_dir = Path(config.log_dir) / config.run_id
        return Checkpointer(
            config.checkpointer,
            config.checkpointer.path(Path(run_dir), Path(run_dir).name),
            self.hosts,
            facts={"seed": str(config.seed), "train_batch_size": str(config.train_batch_size), **facts},
            run_config=run_config,
            reported=self._wait_until_reported,
        )

    def _wait_until_reported(self) -> None:
        self._hooks.flush()
        if isinstance(self.tracker, BackgroundTracker):
            self.tracker.flush(FINISH_S)

    def _flush_tracker(self, wait_s: float) -> None:
        """Wait until the tracker has taken the figures of all steps; what it cannot take in time does not hold us."""
        if self._queue is not None and not self._queue.flush(wait_s):
            log.error("the tracker did not take all figures within %g s; some may be lost", wait_s)


def step_metrics(info: StepInfo, metrics: StepMetrics, batch_size: int) -> Mapping[str, float]:
    """Name the figures of a step as a tracker gets them.

    Args:
        info: The info of the step.
        metrics: The metrics of the step.
        batch_size: The number of rows of the batch.

    Returns:
        ``train/…`` and ``throughput/…``, durations in seconds.
    """
    return {
        "train/loss": info.loss,
        **{f"train/{name}": value for name, value in metrics.values.items()},
        "throughput/step_duration_s": info.step_duration,
        "throughput/examples_per_s": batch_size / info.step_duration,
    }
