"""The training loop: batches in, the same steps launched by every host, hooks and metrics out."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, current, earlier_attempts, leader_only
from lockstep.placement import DCN, data_shards, fsdp_warning, make_mesh, place, place_local
from lockstep.printable import get_logger
from lockstep.report import FINISH_S, BackgroundTracker, NoopTracker, Tracker
from lockstep.training.checkpoints.checkpoint import CheckpointMetadata
from lockstep.training.data.rows import Batches
from lockstep.training.loop.batch_source import BatchFeed, BatchSource, PackedBatches, give_reference
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.loop.hooks import Hook, Hooks, StepInfo
from lockstep.training.loop.logprobs import ReferenceLogprobs
from lockstep.training.loop.profiler import Profiler
from lockstep.training.loop.saves import RunRecord, Saves, directory_of_run, make_checkpointer
from lockstep.training.loop.step_log import Meter, StepLog
from lockstep.training.loop.stopping import LossWatch, StopRequest, TrainResult
from lockstep.training.objectives.logprobs import LossFn
from lockstep.training.step.programs import Programs, compile_largest, memory_for_training
from lockstep.training.step.train_state import TrainState, parameter_shardings
from lockstep.training.step.train_step import StepMetrics, TrainStep, init_model, init_state, state_structs

log = get_logger(__name__)

STOPPED_FLUSH_S = 2.0
"""Seconds that a tracker has to take what is left when a signal ended the run: little time remains for a save."""


class Trainer:
    """Trains a model that is sharded over all devices; every host makes the same calls.

    Args:
        optimizer: The transformation that turns gradients into updates.
        loss_fn: The objective.
        hosts: The processes of the job; None for the current ones.
        mesh: The mesh to train on; None to make it from ``config.mesh_shape``.
        tracker: The tracker that metrics go to; used by the leader alone, from a thread of its own behind a bounded
            queue, so that it may be slow. It stays the caller's to finish. A `BackgroundTracker` is used as it is.
        schedule: The learning rate by completed steps, for the metrics.
        run: The directory of the run, and what its checkpoints say of it.

    Raises:
        ConfigError: The mesh or the batch size does not fit the devices, or there is a checkpointer without a run
            directory.

    Example:
        >>> import numpy as np
        >>> from lockstep.training import OptimizerConfig, TokenizedRows, Trainer, TrainerConfig, lm_loss
        >>> tokens = np.ones((16, 8), np.int32)
        >>> rows = TokenizedRows(columns={"tokens": tokens, "loss_mask": tokens > 0}, seed=0)
        >>> config = TrainerConfig(num_train_steps=2, train_batch_size=8)
        >>> trainer = Trainer(config, OptimizerConfig().build(2), lm_loss)
        >>> start = trainer.init_model(lambda key: LlamaLMHeadModel.init(Vocab, small, key=key))
        >>> trainer.train(start, rows).completed_steps
        step 1/2  loss ...
        step 2/2  loss ...
        2
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
        run: RunRecord = RunRecord(),  # noqa: B008  (frozen)
    ) -> None:
        self.config, self.hosts = config, current() if hosts is None else hosts
        self.mesh = make_mesh(config.mesh_shape) if mesh is None else mesh
        self.tracker: Tracker = NoopTracker() if tracker is None else tracker
        """Safe to call from any thread; give a `SampleCallback` this one, so that both share its queue."""
        self.reference: ReferenceLogprobs | None = None
        """Set it where the objective compares with a frozen model and the rows do not have its column."""
        self._queue: BackgroundTracker | None = None
        if tracker is not None and not isinstance(tracker, BackgroundTracker):
            self.tracker = self._queue = BackgroundTracker(tracker, leader_only)
        self._optimizer, self._loss_fn, self._schedule = optimizer, loss_fn, schedule
        config.microbatches(self.mesh)  # refuses a batch that the mesh does not divide
        self._hooks = Hooks()
        self._step: TrainStep | None = None
        self._programs = Programs(self.hosts, self.mesh)
        self._loss_watch = LossWatch(config.on_nan, config.loss_spike)
        self._checkpointer = make_checkpointer(config, run, self.hosts, reported=self._wait_until_reported)
        self._saves = Saves(self._checkpointer, self._hooks, self._loss_watch, config, self.hosts)
        self.run_dir: Path | None = None if run.directory is None else Path(run.directory).absolute()
        """The directory of the run; None where none was given and nothing needed one."""
        if config.profiler is not None:
            config.profiler.check_processes(self.hosts, self._goes_on)
            why = "trainer.profiler is set, and its trace needs a place"
            self.run_dir = directory_of_run(config, run.directory, why)

    @property
    def train_step_traces(self) -> int:
        """The number of traces of the train step; 1 after any number of steps, or one for each length of rows."""
        return 0 if self._step is None else self._step.traces

    def _goes_on(self) -> bool:
        """Whether the job was started before. All hosts ask together."""
        saves = self._checkpointer
        return earlier_attempts() > 0 or (saves is not None and saves.find(self.config.resume) is not None)

    @property
    def resumed_from(self) -> CheckpointMetadata | None:
        """The checkpoint that `restore` read; None where there was none."""
        return self._saves.resumed_from

    @property
    def checkpoints(self) -> str | None:
        """The directory or URL of the run's checkpoints; None where there are none."""
        return None if self._checkpointer is None else os.fspath(self._checkpointer.directory.path)

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
        """Make a model from a key by ``init``, each device only its part, in the parameter type and sharding."""
        return init_model(init, self.config.seed, self.mesh, self.config.precision, self._programs)

    def frozen_copy(self, model: PyTree) -> PyTree:
        """Copy a model in the compute type, each device only its part, such as the reference of an objective."""
        precision = self.config.precision
        with jax.set_mesh(self.mesh):
            shardings = parameter_shardings(jax.eval_shape(precision.cast_to_compute, model), self.mesh)
        return self._programs("frozen_copy", precision.cast_to_compute, [model], out_shardings=shardings)

    def restore(self, init: Callable[[jax.Array], PyTree], frozen: PyTree = None) -> TrainState | None:
        """Read the newest checkpoint of this run that is not damaged, into the shardings of this mesh.

        Args:
            init: A function that makes a model from a key; only the shapes of its result are used. For a
                `LoraModel` it makes the adapters.
            frozen: What `lockstep.models.split_trained` returned as frozen of a `LoraModel`, which is not in
                checkpoints; None where there is none.

        Raises:
            PeerError: The checkpoint cannot be read or does not fit this run, or ``resume`` is ``must`` and there is
                none, or ``never`` and there is one.

        Returns:
            The state to pass to `train`; None where there is nothing to go on from.
        """
        if self._checkpointer is None:
            return None
        while (metadata := self._checkpointer.find(self.config.resume)) is not None:
            structs, _ = state_structs(init, self._optimizer, self.mesh, self.config.precision)
            if (restored := self._checkpointer.restore(metadata, structs)) is not None:
                state, self._saves.resumed_from = restored
                return state.join(frozen)
        return None

    def train(self, model: PyTree | TrainState, batches: Batches | BatchSource) -> TrainResult:
        """Train until ``num_train_steps`` steps are done.

        Args:
            model: The model, sharded over the mesh, to train from the beginning; or the state that `restore` returned,
                to go on from its step. What is trained of it is donated: use the result's model afterwards.
            batches: What gives each host its rows of each batch; or a source of whole batches, which sees the model
                before each step. It is closed at the end.

        Raises:
            PeerError: The train step does not compile on some host; raised on every host.
            DisagreementError: The hosts compiled different train steps, or with different versions or flags.
            LaunchMismatchError: The hosts launched different programs; found at the end, or in debug mode before the
                launch.
            HostError: A step failed while it ran on several hosts, most likely because one of them has died.
            ConfigError: The state is not one that this trainer has restored.
            DivergenceError: A loss or a gradient is not finite, or a loss is a spike, and ``on_nan`` is ``raise``.

        Returns:
            The trained model and how the run ended. A signal (Ctrl-C, SIGTERM) on any host ends the run after a step,
            the same on all hosts, without the forced last hooks; one that comes while the train step is compiled ends
            it after the first step. One that interrupts a hook before the first step, or after the last, ends it there.
            So does a hook whose ``stop_reason`` is set on the leader.
        """
        with StopRequest(self.hosts) as stop:
            return self._train(model, batches, stop)

    def _train(self, model: PyTree | TrainState, batches: Batches | BatchSource, stop: StopRequest) -> TrainResult:
        config = self.config
        if self.hosts.is_leader and (warning := fsdp_warning(self.mesh)):
            log.warning(warning)
        state, shardings = self._first_state(model)
        del model
        info = self._saves.first_info(state)
        run = self._begin(batches, state, info.next_step)
        stopped_by, diverged, alarmed, between_steps = None, False, False, False
        # A launch from a second thread could come before the train step on one host and after it on another.
        with contextlib.closing(run.source), contextlib.closing(run.log), contextlib.closing(run.profiler):
            step_fn = self._compile(state, shardings, run.source)
            with jax.thread_guard(True), self._saves.completed():
                hooks_called = self._saves.begin(info)
                for step in range(info.next_step, config.num_train_steps if hooks_called else 0):
                    advanced = self._advance(run, step_fn, state, step, stop)
                    if advanced is None:
                        stopped_by, between_steps = stop.between_steps(), True
                        self._hooks.after_signal()
                        break
                    state, info, metrics = advanced
                    stopped_by = stop.after_step(metrics, info.step_duration)
                    diverged = self._loss_watch.judge(info.next_step, metrics, is_leader=self.hosts.is_leader)
                    alarmed = metrics.alarm
                    if stopped_by or diverged or alarmed:
                        self._hooks.after_signal()
                        break
                    hooks_called = self._hooks.after_step(info)
                    self._saves.after_step(state, info, hooks_called=hooks_called, save_requested=metrics.save)
                else:
                    if hooks_called and not self._saves.complete:
                        hooks_called = self._hooks.after_last_step(info)
                        self._saves.after_step(state, info, hooks_called=hooks_called)
                    if not hooks_called:  # a hook was interrupted, and no step is left that would carry the signal
                        stopped_by = stop.between_steps()
                        self._hooks.after_signal()
                if alarmed and self.hosts.is_leader:
                    log.warning("training stops after step %d: %s", info.next_step, self._hooks.stop_reason)
                self._saves.end(state, info, stopped_by, diverged=diverged or alarmed, between_steps=between_steps)
                self._flush_tracker(min(FINISH_S, self.hosts.timeout_s / 2) if stopped_by is None else STOPPED_FLUSH_S)
                with self.hosts.launch_on_all("end of training"):
                    pass  # every launch of the run has been made: they are compared
        return TrainResult(
            checkpoint=self._saves.newest,
            checkpoint_errors=self._saves.errors,
            model=state.model,
            average=info.average,
            completed_steps=info.next_step,
            loss=info.loss,
            progress=getattr(run.source, "progress", ""),
            stopped_by=stopped_by,
            diverged=diverged,
            alarmed=alarmed,
            skipped_steps=self._loss_watch.skipped,
            tracker_errors=self.tracker.errors if isinstance(self.tracker, BackgroundTracker) else 0,
        )

    def _first_state(self, model: PyTree | TrainState) -> tuple[TrainState, PyTree]:
        """The state before the first step of this loop, and its shardings."""
        if not isinstance(model, TrainState):
            self._saves.resumed_from = None
            self._loss_watch.reset()
            return init_state(model, self._optimizer, self.mesh, self.config.precision, self._programs)
        if self._saves.resumed_from is None:
            raise ConfigError(
                "train() was given a state that this trainer has not restored, so its step is not known. Pass the "
                "result of this trainer's restore(), or a model."
            )
        return model, parameter_shardings(model.split()[0], self.mesh)

    def _begin(self, batches: Batches | BatchSource, state: TrainState, first: int) -> "_Run":
        """Open the resources of the loop beside its state."""
        config, hosts = self.config, self.hosts
        if not isinstance(batches, BatchSource):
            batches = BatchFeed(
                batches,
                config.train_batch_size,
                self.mesh,
                first=first,
                last=config.num_train_steps,
                hosts=hosts,
                reference=self.reference,
            )
        give_reference(batches, state)
        job = {"job/processes": hosts.count, "job/slices": self.mesh.shape.get(DCN, 1)}
        traces = None if self.run_dir is None else self.run_dir / "profiler"
        return _Run(
            source=batches,
            log=StepLog(config.num_train_steps, self.tracker, is_leader=hosts.is_leader, job=job),
            profiler=Profiler(config.profiler, traces, hosts.index),
            meter=Meter(self.mesh, state.model),
        )

    def _advance(
        self, run: "_Run", step_fn: TrainStep, state: TrainState, step: int, stop: StopRequest
    ) -> tuple[TrainState, StepInfo, StepMetrics] | None:
        """One step: its batch, the launch, the next batch while the devices work, the figures; None without a batch."""
        requested = time.perf_counter()
        batch = run.source.batch(step, state.model)
        if batch is None:
            return None
        start = time.perf_counter()
        with self._programs.launching("train_step", step), run.profiler.step(step):
            flag = stop.flag(self._saves.flag(), self._hooks.stop_reason)
            state, figures = step_fn(state, batch, *self._signals(step_fn, flag))
            give_reference(run.source, state)
            run.source.prepare(step + 1)
            metrics = step_fn.read(figures)
        seconds = {"step_s": time.perf_counter() - start, "wait_s": start - requested}
        filled = run.source.filled_rows if isinstance(run.source, PackedBatches) else None
        speed = run.meter.step(batch, **seconds, filled_rows=filled)
        info = StepInfo.of(step, state, metrics, speed.step_s)
        run.log.step(info, metrics, speed, getattr(run.source, "progress", ""))
        return state, info, metrics

    def _compile(self, state: TrainState, shardings: PyTree, source: BatchSource) -> TrainStep:
        """The train step, compiled and agreed on by every host; nobody launches it before all are ready."""
        packed = isinstance(source, PackedBatches)
        length = source.structs()["tokens"].shape[-1] if packed else None
        fewest = self.config.microbatches(self.mesh, packed_length=length)

        def make(microbatches: int) -> TrainStep:
            return TrainStep(
                loss_fn=self._loss_fn,
                optimizer=self._optimizer,
                schedule=self._schedule,
                mesh=self.mesh,
                shardings=shardings,
                settings=self.config.step_settings,
                microbatches=microbatches,
                skip_empty=packed,
            )

        todo = source.compile(self._programs, state.model) if isinstance(source, BatchFeed) else [source.structs()]
        if self.config.per_device_parallelism == "auto":  # what fits with the longest rows fits with shorter ones
            longest = todo.pop()
            memory = self.config.step_bytes(lambda: memory_for_training(self.mesh, state))
            rows = self.config.train_batch_size // data_shards(self.mesh)
            self._step = compile_largest(
                self._programs, rows, make, lambda step: (state, longest, *self._signals(step, 0)), memory, fewest
            )
        else:
            self._step = make(fewest)
        signals = self._signals(self._step, 0)
        for batch in todo:
            compile_step = functools.partial(self._step.compile, state, batch, *signals, ledger=self.hosts.ledger)
            self._programs.compile_on_all("train_step", compile_step)
        return self._step

    def _signals(self, step_fn: TrainStep, flag: int) -> list[jax.Array]:
        """Inputs of the step from the hosts: the stop flag on this host's devices, and the limit of the loss."""
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        n_local = len(sharding.addressable_devices)
        signals = [place_local(np.full(n_local, flag, np.int32), sharding, self.mesh.size)]
        if step_fn.skip_bad:
            limit = np.asarray(self._loss_watch.limit, np.float32)
            signals.append(place(limit, NamedSharding(self.mesh, PartitionSpec())))
        return signals

    def _wait_until_reported(self) -> bool:
        hooks_done = self._hooks.flush()
        return (self.tracker.flush(FINISH_S) if isinstance(self.tracker, BackgroundTracker) else True) and hooks_done

    def _flush_tracker(self, wait_s: float) -> None:
        """Wait until the tracker has taken the figures of all steps; what it cannot take in time does not hold us."""
        if self._queue is not None and not self._queue.flush(wait_s):
            log.error("the tracker did not take all figures within %g s; some may be lost", wait_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """The resources of the loop beside its state; all but the meter is closed at the end."""

    source: BatchSource
    log: StepLog
    profiler: Profiler
    meter: Meter
