"""The train step: one program that every host launches."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from lockstep.errors import ConfigError
from lockstep.hosts import Ledger
from lockstep.models import join_trained, pipelined, split_trained
from lockstep.placement import COMPUTE_AXES, DCN, PP, batch_spec, compute_axes, parameter_axes
from lockstep.placement.device import Program, compile_program, program_bytes, without_directories
from lockstep.training.objectives.logprobs import LossFn, LossParts, loss_with_routers
from lockstep.training.step.optimizer import completed_updates
from lockstep.training.step.train_state import Precision, StepSettings, TrainState, cast_floats, parameter_shardings

SKIPPED = "skipped_step"  # the name of the metric that is 1 where a step left its update out
SAVE_FLAG, SLOW_FLAG, ALARM_FLAG = 1, 2, 4
"""Stop flags of the leader, added up: a checkpoint is due; steps are slow, see `StopRequest.after_step`; an alarm ends
the run."""
SIGNAL_FLAG = 8
"""The stop flag of a signal is its number times this, so that it hides those of the leader in the largest flag."""


class Launch(Protocol):
    """Compiles a function on every host, compares the programs of all hosts, and launches it once."""

    def __call__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        out_shardings: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Return the function's result. The arguments are those of `lockstep.placement.device.compile_program`."""
        ...


def init_model(
    init: Callable[[jax.Array], PyTree], seed: int, mesh: Mesh, precision: Precision, launch: Launch
) -> PyTree:
    """Make a model, sharded by `PARAMETER_AXES`, each device only its own part: the same numbers on any mesh.

    Args:
        init: Makes a model from a key; it is traced, never run in one host's memory.
        precision: The float types, of which the parameter type is used.
    """

    def make() -> PyTree:
        return precision.cast_to_param(init(jax.random.key(seed)))

    with jax.set_mesh(mesh):
        shardings = parameter_shardings(jax.eval_shape(make), mesh)
    return launch("init_model", make, [], out_shardings=shardings)


def init_state(
    model: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh, precision: Precision, launch: Launch
) -> tuple[TrainState, PyTree]:
    """Make the first state. What is trained of the model is donated: use the state's model instead.

    Args:
        model: The model on the mesh, in any sharding and float type.
        precision: The float types, of which the parameter type is used.

    Returns:
        The state, and the shardings of what a step changes of it.
    """
    make = _state_maker(optimizer, precision)
    trained, frozen = split_trained(model)
    with jax.set_mesh(mesh):
        shardings = parameter_shardings(jax.eval_shape(make, trained), mesh)
    state: TrainState = launch("init_state", make, [trained], out_shardings=shardings, donate=(0,))
    return state.join(frozen), shardings


def state_structs(
    init: Callable[[jax.Array], PyTree], optimizer: optax.GradientTransformation, mesh: Mesh, precision: Precision
) -> tuple[TrainState, PyTree]:
    """Return the shapes of what `init_model` and `init_state` make: nothing is allocated, and no device is needed.

    Args:
        init: Makes a model from a key; of a `LoraModel` the part that is trained.
        mesh: The mesh of the run; its devices may be ones that can only be compiled for.
        precision: The float types, of which the parameter type is used.

    Returns:
        The state with a shape struct in place of each array, and its shardings.
    """
    make = _state_maker(optimizer, precision)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: make(init(jax.random.key(0))))
    shardings = parameter_shardings(shapes, mesh)
    structs = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, shardings
    )
    return structs, shardings


def batch_structs(columns: Mapping[str, jax.ShapeDtypeStruct], n_rows: int, mesh: Mesh) -> dict[str, Any]:
    """Return the shapes of a batch."""
    sharding = NamedSharding(mesh, batch_spec(mesh))
    return {
        name: jax.ShapeDtypeStruct((n_rows, *column.shape), column.dtype, sharding=sharding)
        for name, column in columns.items()
    }


def _state_maker(optimizer: optax.GradientTransformation, precision: Precision) -> Callable[[PyTree], TrainState]:
    def make(model: PyTree) -> TrainState:
        model = precision.cast_to_param(model)
        return TrainState(step=jnp.zeros((), jnp.int32), model=model, opt_state=optimizer.init(model))

    return make


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics of one step, the same on every host."""

    loss: float  # the mean loss over the batch, before the update
    stop: int  # the largest number of a signal that asked a host to stop; 0 where none did
    save: bool  # whether the leader asked for a checkpoint; False where a host was asked to stop
    slow: bool  # whether the leader said that steps are slow; False where a host was asked to stop
    values: Mapping[str, float]  # further metrics by name
    alarm: bool = False  # whether an alarm on the leader ends the run; False where a host was asked to stop


class TrainStep:
    """The train step: compiled ahead of time, so that hosts agree on it before its first launch; traced once for each
    shape of a batch.

    Args:
        schedule: The learning rate by completed steps, to report as a metric; None to report none.
        microbatches: The number of parts of the batch that are computed one after the other; with stages, this many of
            each stage pass through them.
        skip_empty: Whether the last microbatches may have no tokens (``segment_ids`` of 0 alone); they are left out.
    """

    def __init__(
        self,
        *,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        schedule: optax.Schedule | None,
        mesh: Mesh,
        shardings: PyTree,
        settings: StepSettings,
        microbatches: int,
        skip_empty: bool = False,
    ) -> None:
        self._loss_fn, self._optimizer, self._schedule = loss_fn, optimizer, schedule
        self._mesh, self._precision, self._settings, self._skip_empty = mesh, settings.precision, settings, skip_empty
        self._microbatches, self._piped = (1, microbatches) if PP in mesh.shape else (microbatches, 1)
        self._names: tuple[str, ...] = ()
        self._out_shardings = shardings, NamedSharding(mesh, P())
        self._programs: dict[_BatchShape, Program] = {}

    @property
    def skip_bad(self) -> bool:
        """See `StepSettings`."""
        return self._settings.skip_bad

    @property
    def traces(self) -> int:
        """The number of times that the step was traced."""
        return sum(program.traces for program in self._programs.values())

    def needed_bytes(self) -> int:
        """Return the bytes per device at the worst moment of the compiled step with its largest batch, its arguments
        among them.
        """
        assert self._programs, "compile() comes first"
        platform = self._mesh.devices.flat[0].platform
        return max(program_bytes(program.memory(), platform) for program in self._programs.values())

    def compile(self, state: TrainState, batch: Mapping[str, Any], *signals: Any, ledger: Ledger) -> Mapping[str, str]:
        """Compile for arguments of these shapes, beside the programs that were compiled for batches of other shapes;
        nothing is launched, and no other host is waited for.

        Args:
            state: The first argument of a call; it is not donated here.
            batch: The second argument of a call, or its shapes with shardings.

        Returns:
            The program's digests, which all hosts must compare before the first call.

        Raises:
            LockstepError: The compiler refused the program.
        """
        program = self._programs[_batch_shape(batch)] = compile_program(
            "train_step",
            self._step,
            [*state.split(), dict(batch), *signals],
            mesh=self._mesh,
            ledger=ledger,
            donate=(0,),
            out_shardings=self._out_shardings,
        )
        return program.digests

    def __call__(
        self, state: TrainState, batch: Mapping[str, Array], stop: Int[Array, " device"], *limit: Float[Array, ""]
    ) -> Any:
        """Launch one step.

        Args:
            state: The state, which is donated: its arrays are deleted, but for those that are frozen.
            stop: On the devices of a host that was asked to stop `SIGNAL_FLAG` times the number of the signal; on those
                of the leader `SAVE_FLAG`, `SLOW_FLAG` and `ALARM_FLAG`; 0 on all others.
            limit: With ``skip_bad``, the largest loss with which the step counts; infinity for any.

        Returns:
            The next state, and the metrics as an array for `read`.

        Raises:
            ConfigError: The step is not compiled for a batch of this shape.
        """
        shape = _batch_shape(batch)
        if shape not in self._programs:
            compiled = " or ".join(map(_text, self._programs))
            raise ConfigError(
                f"a batch is {_text(shape)}, but the train step was compiled for {compiled}, and nothing is compiled "
                "after the start. Pad rows to one length, or give the batches the property lengths (BatchesOfLengths)."
            )
        changing, frozen = state.split()
        new, metrics = self._programs[shape](changing, frozen, dict(batch), stop, *limit)
        return new.join(frozen), metrics

    def lower(self, state: TrainState, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Trace the step for shapes; nothing is launched."""
        sharding = NamedSharding(self._mesh, P(self._mesh.axis_names))
        signals = [jax.ShapeDtypeStruct((self._mesh.size,), jnp.int32, sharding=sharding)]
        if self.skip_bad:
            signals.append(jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(self._mesh, P())))
        with jax.set_mesh(self._mesh), without_directories():
            jitted = jax.jit(self._step, donate_argnums=0, out_shardings=self._out_shardings)
            return jitted.lower(*state.split(), dict(batch), *signals)

    def read(self, metrics: Array) -> StepMetrics:
        """Wait for a step and fetch its metrics, which are the same on every host; nothing is launched."""
        loss, largest, *numbers = (float(x) for x in jax.device_get(metrics.addressable_data(0)))
        values = dict(zip(self._names, numbers, strict=True))
        stop, flags = divmod(int(largest), SIGNAL_FLAG)
        return StepMetrics(
            loss=loss,
            stop=stop,
            save=bool(flags & SAVE_FLAG),
            slow=bool(flags & SLOW_FLAG),
            alarm=bool(flags & ALARM_FLAG),
            values=values,
        )

    def _step(
        self, state: TrainState, frozen: PyTree, batch: dict[str, Array], stop: Array, *limit: Array
    ) -> tuple[TrainState, Float[Array, " n"]]:
        parts, gradients = self._differentiate(state.model, frozen, batch)
        # The parts of their norm are exchanged together, after the backward pass. XLA's runtime for CPUs orders
        # collectives by their beginnings alone: one for a part that is ready early can meet one of the backward pass.
        gradients = jax.lax.optimization_barrier(gradients)
        updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.model)
        model = optax.apply_updates(state.model, updates)
        values = parts.means()
        values["grad_norm"] = optax.global_norm(gradients)
        if self._schedule is not None:
            updates_done = completed_updates(state.opt_state)
            values["learning_rate"] = jnp.asarray(self._schedule(state.step if updates_done is None else updates_done))
        loss = parts.total / parts.weight
        if self.skip_bad:
            good = jnp.isfinite(loss) & jnp.isfinite(values["grad_norm"]) & (loss <= limit[0])
            new, old = (model, opt_state), (state.model, state.opt_state)
            model, opt_state = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
            values[SKIPPED] = ~good
        self._names = tuple(values)
        metrics = [loss, jnp.max(stop), *values.values()]
        new_state = TrainState(step=state.step + 1, model=model, opt_state=opt_state)
        return new_state, jnp.stack([jnp.asarray(x, jnp.float32) for x in metrics])

    def _differentiate(self, model: PyTree, frozen: PyTree, batch: dict[str, Array]) -> tuple[LossParts, PyTree]:
        """Return the sums over the whole batch and the gradient of the mean loss, microbatch by microbatch."""
        if DCN in self._mesh.shape:
            over_slices = jax.shard_map(
                self._differentiate_slice,
                mesh=self._mesh,
                axis_names={DCN},
                in_specs=(P(), P(), P(DCN)),
                out_specs=P(),
                check_vma=False,
            )
            summed: tuple[LossParts, PyTree] = over_slices(model, frozen, batch)
            return summed
        if self._microbatches == 1:
            # Gradients that are divided afterwards are for a moment in memory twice.
            (_, parts), gradients = eqx.filter_value_and_grad(self._mean, has_aux=True)(model, frozen, batch)
            return parts, gradients
        parts, gradients = self._sums(model, frozen, batch)
        return parts, self._precision.cast_to_param(jax.tree.map(lambda g: g / parts.weight, gradients))

    def _differentiate_slice(self, model: PyTree, frozen: PyTree, batch: dict[str, Array]) -> tuple[LossParts, PyTree]:
        """`_differentiate` on one slice, which has all parameters: slices meet once, when all microbatches are done."""
        parts, gradients = self._sums(model, frozen, batch)
        parts = jax.lax.psum(parts, DCN)

        def mean(gradient: Array) -> Array:
            sent = (gradient / parts.weight).astype(self._settings.reduce_dtype or self._precision.param)
            if self._mesh.devices.flat[0].platform == "cpu":  # XLA for CPUs aborts when it compiles a sum of bfloat16
                sent = sent.astype(jnp.float32)
            return jax.lax.psum(sent, DCN)

        return parts, self._precision.cast_to_param(jax.tree.map(mean, gradients))

    def _sums(self, model: PyTree, frozen: PyTree, batch: dict[str, Array]) -> tuple[LossParts, PyTree]:
        """Return the sums of the microbatches, and the gradient of the sum of losses. That of several is added up in
        float32: a sum in bfloat16 loses what is less than a 256th of it.
        """
        differentiate = eqx.filter_value_and_grad(self._total, has_aux=True)
        if self._microbatches == 1:
            (_, parts), gradients = differentiate(model, frozen, batch)
            return parts, hax.shard(gradients, parameter_axes(self._mesh), self._mesh)

        def add(sums: PyTree, microbatch: dict[str, Array]) -> tuple[PyTree, None]:
            (_, parts), gradients = differentiate(model, frozen, microbatch)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, (parts, gradients)), None

        split = {name: self._split(rows) for name, rows in batch.items()}
        (_, parts), gradients = jax.eval_shape(differentiate, model, frozen, {k: v[0] for k, v in split.items()})
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), (parts, gradients))
        zeros = (zeros[0], hax.shard(zeros[1], parameter_axes(self._mesh), self._mesh))
        if self._skip_empty:
            return over_filled(add, zeros, split)
        summed: tuple[LossParts, PyTree] = jax.lax.scan(add, zeros, split)[0]
        return summed

    def _total(self, model: PyTree, frozen: PyTree, batch: dict[str, Array]) -> tuple[Array, LossParts]:
        with hax.axis_mapping(compute_axes(self._mesh, of_slice=True)):
            joined = self._precision.cast_to_compute(join_trained(model, frozen))
            joined = pipelined(joined, self._piped, self._settings.repeats)
            parts = loss_with_routers(self._loss_fn, joined, batch)
        parts = cast_floats(parts, jnp.dtype(jnp.float32))
        return parts.total, parts

    def _mean(self, model: PyTree, frozen: PyTree, batch: dict[str, Array]) -> tuple[Array, LossParts]:
        total, parts = self._total(model, frozen, batch)
        return total / parts.weight, parts

    def _split(self, rows: Array) -> Array:
        """Reshape ``[row, ...]`` to ``[microbatch, row, ...]`` without moving a row to another device."""
        n_shards = self._mesh.shape["dp"] * self._mesh.shape["fsdp"]
        parts = rows.reshape(n_shards, self._microbatches, -1, *rows.shape[1:]).swapaxes(0, 1)
        flat = parts.reshape(self._microbatches, -1, *rows.shape[1:])
        return jax.lax.with_sharding_constraint(flat, P(None, COMPUTE_AXES["batch"]))


def over_filled[Carry](
    function: Callable[[Carry, dict[str, Array]], tuple[Carry, Any]], carry: Carry, microbatches: Mapping[str, Array]
) -> Carry:
    """Return the carry of a `jax.lax.scan` over the microbatches up to the last that has tokens, and the first.

    Args:
        microbatches: Columns ``[microbatch, row, ...]`` with ``segment_ids``.
    """
    filled = jnp.any(microbatches["segment_ids"] != 0, axis=(1, 2))
    end = jnp.max(jnp.where(filled, jnp.arange(1, len(filled) + 1), 1))

    def turn(index: Array, carry: Carry) -> Carry:
        part = {name: jax.lax.dynamic_index_in_dim(rows, index, keepdims=False) for name, rows in microbatches.items()}
        return function(carry, part)[0]

    return jax.lax.fori_loop(0, end, turn, carry)


type _BatchShape = frozenset[tuple[str, tuple[int, ...]]]


def _batch_shape(batch: Mapping[str, Any]) -> _BatchShape:
    return frozenset((name, tuple(column.shape)) for name, column in batch.items())


def _text(shape: _BatchShape) -> str:
    return ", ".join(f"{name} {list(sizes)}" for name, sizes in sorted(shape))
