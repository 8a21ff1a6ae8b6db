"""The train step: one program that every host launches alike."""

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

from lockstep.engine import Program, compile_program
from lockstep.errors import ConfigError
from lockstep.hosts import Ledger
from lockstep.placement import COMPUTE_AXES, MESH_AXES, PARAMETER_AXES
from lockstep.training.objectives.parts import LossFn, LossParts
from lockstep.training.precision import Precision, cast_floats

BATCH_SPEC = P(("dp", "fsdp"))
"""Rows of a batch on the mesh."""

STOP_SPEC = P(MESH_AXES)
"""The stop flags on the mesh: one per device."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes. Donated to the next step: take what you need from the newest state only."""

    step: Int[Array, ""]
    """Completed steps."""
    model: PyTree
    """Parameters in the parameter type and sharding."""
    opt_state: PyTree
    """State of the optimizer, sharded as the parameters it belongs to."""


def parameter_shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """Sharding of every array of a model or of an optimizer state.

    Args:
        tree: haliax arrays or their shapes; an array without axis names is replicated.
        mesh: to lie on.

    Returns:
        The tree with a sharding in place of each array.

    Raises:
        ConfigError: the mesh does not divide an axis.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> Any:
        if not _named(leaf):
            return NamedSharding(mesh, P())
        for axis in leaf.axes:
            mesh_axis = PARAMETER_AXES.get(axis.name)
            if mesh_axis is not None and axis.size % mesh.shape[mesh_axis]:
                raise ConfigError(
                    f"parameter {jax.tree_util.keystr(path)}: its axis {axis.name!r} has size {axis.size}, which the "
                    f"mesh axis {mesh_axis!r} of size {mesh.shape[mesh_axis]} does not divide. Choose a mesh_shape "
                    f"whose {mesh_axis} divides {axis.size} (mesh now: {dict(mesh.shape)}), or change the model."
                )
        spec = P(*(PARAMETER_AXES.get(axis.name) for axis in leaf.axes))
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), leaf)

    return jax.tree_util.tree_map_with_path(sharding, tree, is_leaf=_named)


class Launch(Protocol):
    """Compiles a function that all hosts call alike, agrees on the program, launches it once."""

    def __call__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        out_shardings: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """The function's result, see `lockstep.engine.compile_program`."""
        ...


def init_model(
    init: Callable[[jax.Array], PyTree], seed: int, mesh: Mesh, precision: Precision, launch: Launch
) -> PyTree:
    """Make a model whose parameters come into being on the devices that hold them.

    Args:
        init: makes a model from a key; traced, never run on one host's memory.
        seed: of the key.
        mesh: of the run.
        precision: gives the parameter type.
        launch: launches the program that makes it.

    Returns:
        The model, sharded by `PARAMETER_AXES`; the same numbers on any mesh.
    """

    def make() -> PyTree:
        return precision.cast_to_param(init(jax.random.key(seed)))

    with jax.set_mesh(mesh):
        shardings = parameter_shardings(jax.eval_shape(make), mesh)
    return launch("init_model", make, [], out_shardings=shardings)


def init_state(
    model: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh, precision: Precision, launch: Launch
) -> tuple[TrainState, PyTree]:
    """Make the first state. The model is donated: use the state's instead.

    Args:
        model: on the mesh, in any sharding and float type.
        optimizer: of the run.
        mesh: of the run.
        precision: gives the parameter type.
        launch: launches the program that makes it.

    Returns:
        The state, and its shardings.
    """
    make = _state_maker(optimizer, precision)
    with jax.set_mesh(mesh):
        shardings = parameter_shardings(jax.eval_shape(make, model), mesh)
    return launch("init_state", make, [model], out_shardings=shardings, donate=(0,)), shardings


def state_structs(
    init: Callable[[jax.Array], PyTree], optimizer: optax.GradientTransformation, mesh: Mesh, precision: Precision
) -> tuple[TrainState, PyTree]:
    """What `init_model` and `init_state` would make, as shapes: nothing is allocated, and no device is needed.

    Args:
        init: makes a model from a key.
        optimizer: of the run.
        mesh: of the run; its devices may be ones that can only be compiled for.
        precision: gives the parameter type.

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
    """A batch as shapes.

    Args:
        columns: shape and type of one row of each column.
        n_rows: of the batch.
        mesh: of the run.
    """
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return {
        name: jax.ShapeDtypeStruct((n_rows, *one.shape), one.dtype, sharding=sharding) for name, one in columns.items()
    }


def _state_maker(optimizer: optax.GradientTransformation, precision: Precision) -> Callable[[PyTree], TrainState]:
    def make(model: PyTree) -> TrainState:
        model = precision.cast_to_param(model)
        return TrainState(step=jnp.zeros((), jnp.int32), model=model, opt_state=optimizer.init(model))

    return make


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Figures of one step, read by every host alike."""

    loss: float
    """Mean loss over the batch, before the update."""
    stop: int
    """Largest signal that asked a host to stop; 0: none did."""
    values: Mapping[str, float]
    """Further figures by name."""


class TrainStep:
    """The train step: compiled ahead of time, so that hosts agree on it before its first launch; traced once.

    Args:
        loss_fn: the objective.
        optimizer: of the run.
        schedule: learning rate by completed steps, reported as a metric; None: not reported.
        mesh: of the run.
        shardings: of the state, from `init_state`.
        precision: float types.
        microbatches: parts that the batch is worked on in, one after the other.
    """

    def __init__(
        self,
        *,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        schedule: optax.Schedule | None,
        mesh: Mesh,
        shardings: PyTree,
        precision: Precision,
        microbatches: int,
    ) -> None:
        self._loss_fn, self._optimizer, self._schedule = loss_fn, optimizer, schedule
        self._mesh, self._precision, self._microbatches = mesh, precision, microbatches
        self._names: tuple[str, ...] = ()
        self._out_shardings = shardings, NamedSharding(mesh, P())
        self._program: Program | None = None

    @property
    def traces(self) -> int:
        """How often the step was traced."""
        return 0 if self._program is None else self._program.traces

    def compile(
        self, state: TrainState, batch: Mapping[str, Array], stop: Int[Array, " device"], ledger: Ledger
    ) -> Mapping[str, str]:
        """Compile for arguments of these shapes; launches nothing and talks to no other host.

        Args:
            state: as for a call; kept as it is.
            batch: as for a call.
            stop: as for a call.
            ledger: where launches are recorded.

        Returns:
            The program's digests, which all hosts must agree on before the first call.

        Raises:
            LockstepError: the compiler refused the program.
        """
        self._program = compile_program(
            "train_step",
            self._step,
            [state, dict(batch), stop],
            mesh=self._mesh,
            ledger=ledger,
            donate=(0,),
            out_shardings=self._out_shardings,
        )
        return self._program.digests

    def __call__(self, state: TrainState, batch: Mapping[str, Array], stop: Int[Array, " device"]) -> Any:
        """Launch one step.

        Args:
            state: donated; its arrays are deleted.
            batch: global arrays, the row as axis 0.
            stop: on the devices of a host that was asked to stop, the signal that asked; else 0.

        Returns:
            The next state, and the figures as an array for `read`.
        """
        assert self._program is not None, "compile() comes before the first call"
        return self._program(state, dict(batch), stop)

    def lower(self, state: TrainState, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Trace the step for shapes; launches nothing.

        Args:
            state: arrays or shape structs with shardings.
            batch: the same for the columns of a batch.
        """
        sharding = NamedSharding(self._mesh, STOP_SPEC)
        stop = jax.ShapeDtypeStruct((self._mesh.size,), jnp.int32, sharding=sharding)
        with jax.set_mesh(self._mesh):
            jitted = jax.jit(self._step, donate_argnums=0, out_shardings=self._out_shardings)
            return jitted.lower(state, dict(batch), stop)

    def read(self, figures: Array) -> StepMetrics:
        """Wait for a step and fetch its figures; no launch, the same on every host.

        Args:
            figures: second result of a call.
        """
        loss, stop, *others = (float(x) for x in jax.device_get(figures.addressable_data(0)))
        return StepMetrics(loss=loss, stop=int(stop), values=dict(zip(self._names, others, strict=True)))

    def _step(self, state: TrainState, batch: dict[str, Array], stop: Array) -> tuple[TrainState, Float[Array, " n"]]:
        parts, gradients = self._sums(state.model, batch)
        gradients = jax.tree.map(lambda g: (g / parts.weight).astype(g.dtype), gradients)
        updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.model)
        model = optax.apply_updates(state.model, updates)
        values = {name: total / parts.weight for name, total in parts.metrics.items()}
        values["grad_norm"] = optax.global_norm(gradients)
        if self._schedule is not None:
            values["learning_rate"] = jnp.asarray(self._schedule(state.step))
        self._names = tuple(values)
        figures = [parts.total / parts.weight, jnp.max(stop), *values.values()]
        new_state = TrainState(step=state.step + 1, model=model, opt_state=opt_state)
        return new_state, jnp.stack([jnp.asarray(x, jnp.float32) for x in figures])

    def _sums(self, model: PyTree, batch: dict[str, Array]) -> tuple[LossParts, PyTree]:
        """Sums over the whole batch and the gradient of their total, microbatch by microbatch."""
        differentiate = eqx.filter_value_and_grad(self._total, has_aux=True)
        if self._microbatches == 1:
            (_, parts), gradients = differentiate(model, batch)
            return parts, gradients

        def add(sums: PyTree, microbatch: dict[str, Array]) -> tuple[PyTree, None]:
            (_, parts), gradients = differentiate(model, microbatch)
            return jax.tree.map(jnp.add, sums, (parts, gradients)), None

        split = {name: self._split(rows) for name, rows in batch.items()}
        (_, parts), gradients = jax.eval_shape(differentiate, model, {k: v[0] for k, v in split.items()})
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (parts, gradients))
        zeros = (zeros[0], hax.shard(zeros[1], PARAMETER_AXES, self._mesh))
        (parts, gradients), _ = jax.lax.scan(add, zeros, split)
        return parts, gradients

    def _total(self, model: PyTree, batch: dict[str, Array]) -> tuple[Array, LossParts]:
        with hax.axis_mapping(COMPUTE_AXES):
            parts = self._loss_fn(self._precision.cast_to_compute(model), batch)
        parts = cast_floats(parts, jnp.dtype(jnp.float32))
        return parts.total, parts

    def _split(self, rows: Array) -> Array:
        """``[row, ...]`` to ``[microbatch, row, ...]`` without moving a row to another device."""
        n_shards = self._mesh.shape["dp"] * self._mesh.shape["fsdp"]
        parts = rows.reshape(n_shards, self._microbatches, -1, *rows.shape[1:]).swapaxes(0, 1)
        flat = parts.reshape(self._microbatches, -1, *rows.shape[1:])
        return jax.lax.with_sharding_constraint(flat, NamedSharding(self._mesh, P(None, *BATCH_SPEC)))


def _named(leaf: Any) -> bool:
    return isinstance(leaf, hax.NamedArray)
