"""Log-probabilities that are columns of batches: of a frozen model, or of the one that learns before its update."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, runtime_checkable

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from lockstep.errors import ConfigError
from lockstep.hosts import Hosts
from lockstep.models import pipelined
from lockstep.placement import batch_spec, compute_axes, data_shards
from lockstep.placement.device import Program, fetch
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.objectives import REFERENCE
from lockstep.training.step.programs import Programs
from lockstep.training.step.train_step import over_filled

type Columns = Mapping[str, Any]
"""The columns of a batch as global arrays, or as shape structs with shardings."""


class LogprobProgram:
    """Computes log-probabilities of batches, microbatch by microbatch; compiled ahead of time for each shape.

    Args:
        function: A function of a model in the compute type, or a tuple of them, and the columns of a microbatch, with
            the row as axis 0 of its result.
        before: A function that makes the columns of a whole batch from those that are given.
        after: A function of the result for a whole batch, and its columns, that makes the program's result.
        replicated: Whether every device gets all of the result; otherwise its rows are where those of the batch are.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[PyTree, Mapping[str, Array]], Array],
        *,
        trainer: TrainerConfig,
        programs: Programs,
        replicated: bool = False,
        before: Callable[[Mapping[str, Array]], Mapping[str, Array]] = dict,
        after: Callable[[Array, Mapping[str, Array]], Array] = lambda result, batch: result,
    ) -> None:
        self._before, self._after = before, after
        self._name, self._function, self._trainer = name, function, trainer
        self._programs, self._mesh = programs, programs.mesh
        self._sharding = NamedSharding(self._mesh, P() if replicated else batch_spec(self._mesh))
        self._by_shape: dict[Hashable, Program] = {}

    @property
    def traces(self) -> int:
        """The number of times that the program was traced: once for each shape."""
        return sum(program.traces for program in self._by_shape.values())

    def compile(self, model: PyTree, batch: Columns, microbatches: int | None = None) -> Mapping[str, str]:
        """Compile, unless that is done; nothing is launched, and no other host is waited for.

        Args:
            microbatches: The number of parts that the rows are computed in; None: as many rows at a time as training.

        Returns:
            The program's digests, which all hosts must compare before the first call.
        """
        key = _shape(model, batch)
        if key not in self._by_shape:
            n_rows, *_, length = batch["tokens"].shape
            packed_length = length if "segment_ids" in batch else None
            parts = self._microbatches(n_rows, packed_length=packed_length) if microbatches is None else microbatches
            compute = functools.partial(self._compute, parts)
            arguments = [model, dict(batch)]
            self._by_shape[key] = self._programs.compile(self._name, compute, arguments, out_shardings=self._sharding)
        return self._by_shape[key].digests

    def __call__(self, model: PyTree, batch: Columns, step: int | None = None) -> Array:
        """Launch; the result is float32, with the row as axis 0.

        Args:
            step: The completed steps of training, for an error that says so, see `Programs.launching`.
        """
        with self._programs.launching(self._name, step):
            return self._by_shape[_shape(model, batch)](model, dict(batch))

    def fetch(self, model: PyTree, batch: Columns) -> np.ndarray:
        """Launch, wait, and copy the result to the host; it has to be replicated."""
        with self._programs.launching(self._name):
            return fetch(self._by_shape[_shape(model, batch)](model, dict(batch)))

    def _microbatches(self, n_rows: int, *, packed_length: int | None) -> int:
        if self._trainer.per_device_parallelism == "auto":
            # The trainer finds its number by compiling; a forward pass of one row at a time fits beside any.
            return n_rows // data_shards(self._mesh)
        parts = self._trainer.microbatches(self._mesh, packed_length=packed_length)
        return parts * (n_rows // self._trainer.train_batch_size)

    def _compute(self, microbatches: int, model: PyTree, batch: Mapping[str, Array]) -> Array:
        def prepared(model: PyTree) -> PyTree:
            return pipelined(self._trainer.precision.cast_to_compute(model))

        model = tuple(map(prepared, model)) if isinstance(model, tuple) else prepared(model)
        batch = self._before(batch)
        shards = data_shards(self._mesh)
        split = NamedSharding(self._mesh, P(None, *batch_spec(self._mesh)))

        def parts(rows: Array) -> Array:
            # As in the train step: each device works on its own rows, whatever the number of microbatches.
            by_part = rows.reshape(shards, microbatches, -1, *rows.shape[1:]).swapaxes(0, 1)
            return jax.lax.with_sharding_constraint(by_part.reshape(microbatches, -1, *rows.shape[1:]), split)

        def logprobs(part: Mapping[str, Array]) -> Array:
            with hax.axis_mapping(compute_axes(self._mesh)):
                return self._function(model, part)

        split_batch = {name: parts(rows) for name, rows in batch.items()}
        if "segment_ids" in batch:
            computed = _of_filled(logprobs, split_batch)
        else:
            _, computed = jax.lax.scan(lambda carry, part: (carry, logprobs(part)), None, split_batch)
        n_rows = len(batch["tokens"])
        by_shard = computed.reshape(microbatches, shards, -1, *computed.shape[2:]).swapaxes(0, 1)
        return self._after(by_shard.reshape(n_rows, *computed.shape[2:]).astype(jnp.float32), batch)


def _of_filled(function: Callable[[Mapping[str, Array]], Array], microbatches: Mapping[str, Array]) -> Array:
    """The results of a function of a microbatch, stacked; 0 for the last ones where they have no tokens."""

    def put(carry: tuple[Array, Array], part: Mapping[str, Array]) -> tuple[tuple[Array, Array], None]:
        index, results = carry
        return (index + 1, jax.lax.dynamic_update_index_in_dim(results, function(part), index, 0)), None

    result = jax.eval_shape(function, {name: rows[0] for name, rows in microbatches.items()})
    empty = jnp.zeros((len(microbatches["tokens"]), *result.shape), result.dtype)
    results: Array = over_filled(put, (jnp.zeros((), jnp.int32), empty), microbatches)[1]
    return results


def _shape(model: PyTree, batch: Columns) -> Hashable:
    """The key of a program: the shape of the rows, and the types of the model; an average may have one of its own."""
    return batch["tokens"].shape, tuple(leaf.dtype for leaf in jax.tree.leaves(model))


@runtime_checkable
class NeedsReference(Protocol):
    """An objective that compares with a frozen model, such as `PreferenceObjective` with ``NEEDS_REFERENCE``."""

    def reference_logprobs(self, model: PyTree, batch: Mapping[str, Array], /) -> Float[Array, " row *shape"]:
        """Return the column ``reference_logprobs`` of a (micro)batch."""
        ...


@runtime_checkable
class NeedsReferencePoint(NeedsReference, Protocol):
    """One that also compares with a figure of the whole batch, such as `KtoConfig`. Its ``reference_logprobs`` gets a
    tuple of the model that learns and the frozen one.
    """

    def mismatched(self, batch: Mapping[str, Array], /) -> Mapping[str, Array]:
        """Return the columns of a whole batch with those that ``reference_logprobs`` reads."""
        ...

    def with_reference_point(self, logprobs: Array, batch: Mapping[str, Array], /) -> Float[Array, "row 2"]:
        """Return the column ``reference_logprobs`` of a whole batch, from what that method returned."""
        ...


class ReferenceLogprobs:
    """Adds the column ``reference_logprobs`` to batches of files, by one program that runs before the train step.

    It is computed anew whenever a row is drawn, so that there is nothing to keep in a checkpoint: a run that goes on
    needs the same frozen model alone. Nothing waits for the result; it stays on the devices.

    Args:
        model: The frozen model on the mesh, which no step may change: `Trainer.frozen_copy` of the first one, or the
            base of a `LoraModel`. Where the optimizer keeps a reference (`ReferenceRenewal`), any in its place.

    Raises:
        ConfigError: The objective has no ``reference_logprobs``.
    """

    def __init__(self, objective: Any, model: PyTree, trainer: TrainerConfig, mesh: Mesh, hosts: Hosts) -> None:
        if not isinstance(objective, NeedsReference):
            raise ConfigError(
                f"{type(objective).__name__} has no method reference_logprobs, so it has no use for a reference model. "
                "Leave the reference out."
            )
        self._model = model
        around: dict[str, Any] = {}
        if isinstance(objective, NeedsReferencePoint):
            around = {"before": objective.mismatched, "after": objective.with_reference_point}
        self._has_point = bool(around)
        self._program = LogprobProgram(
            REFERENCE, objective.reference_logprobs, trainer=trainer, programs=Programs(hosts, mesh), **around
        )

    @property
    def traces(self) -> int:
        """The number of times that the program was traced: once for each shape of a batch."""
        return self._program.traces

    def compile(self, model: PyTree, batch: Columns, microbatches: int | None = None) -> Mapping[str, str]:
        """Compile for a shape, unless that is done, and return digests for hosts to compare, see `LogprobProgram`.

        Args:
            model: The model that learns, or its shapes.
        """
        return self._program.compile(self._models(model), _read(batch), microbatches)

    def use(self, model: PyTree) -> None:
        """Take another model as the frozen one, for the batches until the next call."""
        self._model = model

    def structs(self, batch: Columns) -> dict[str, Any]:
        """Return the shapes of a batch with its further column."""
        tokens = batch["tokens"]
        shape = (*tokens.shape[:-1], 2) if self._has_point else tokens.shape[:-1]
        column = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=tokens.sharding)
        return {**batch, REFERENCE: column}

    def add_to(self, model: PyTree, batch: Columns, step: int) -> dict[str, Any]:
        """Launch, and return the batch with its further column.

        Args:
            model: The model that learns.

        Raises:
            HostError: The runtime failed, on several hosts most likely because one of them has died.
        """
        return {**batch, REFERENCE: self._program(self._models(model), _read(batch), step)}

    def _models(self, model: PyTree) -> PyTree:
        return (model, self._model) if self._has_point else self._model


def _read(batch: Columns) -> Columns:
    return {name: column for name, column in batch.items() if name != REFERENCE}
