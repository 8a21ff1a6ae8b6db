"""Validation: the loss on data that is not trained on, on all hosts, by one program."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from lockstep.models import pipelined
from lockstep.placement import batch_spec, compute_axes, host_rows, place_local
from lockstep.placement.device import Program
from lockstep.printable import get_logger
from lockstep.training.loop.hooks import StepInfo
from lockstep.training.loop.trainer import Trainer
from lockstep.training.objectives import REFERENCE, LossFn
from lockstep.training.step.programs import Programs
from lockstep.training.step.train_state import cast_floats

BATCHES_AHEAD = 16
"""Batches that a host has read and placed before the hosts launch them: as many launches follow on one exchange."""

log = get_logger(__name__)


class ValidationRows(Protocol):
    """Rows to validate with, such as a `TokenCache`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def take(self, numbers: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Return the columns of some rows."""
        ...


class Validation:
    """A hook that computes loss and metrics of each source, and gives them to the tracker.

    The figures are exact: sums over all rows divided by the sum of their weights. What fills up the last batch has no
    target, and so no weight. They follow from the parameters alone, so those of a run that was resumed are the same.

    Args:
        trainer: The trainer of the run, of which mesh, hosts, tracker, float types and reference are used.
        loss_fn: The objective. A row without a target must have no weight in it.
        perplexity: Whether the loss is a mean over tokens, of which the exponential is the perplexity.
    """

    def __init__(
        self, trainer: Trainer, loss_fn: LossFn, sources: Mapping[str, ValidationRows], *, perplexity: bool
    ) -> None:
        self._trainer, self._hosts, self._mesh, self._tracker = trainer, trainer.hosts, trainer.mesh, trainer.tracker
        self._precision = trainer.config.precision
        self._loss_fn, self._sources, self._perplexity = loss_fn, dict(sources), perplexity
        self._batch_size = trainer.config.eval_batch_size(trainer.mesh)
        self._sharding = NamedSharding(self._mesh, batch_spec(self._mesh))
        self._rows = host_rows(self._sharding, self._batch_size)
        self._programs = Programs(self._hosts, self._mesh)
        self._names: tuple[str, ...] = ()
        self._program: Program | None = None
        self.metrics: Mapping[str, float] = {}
        """The figures of the last validation, as the tracker got them; the same on every host."""

    @property
    def traces(self) -> int:
        """The number of times that the program was traced; 1 after any number of validations."""
        return 0 if self._program is None else self._program.traces

    def __call__(self, info: StepInfo) -> None:
        """Validate the parameters of a step, or their average where there is one; every host makes this call.

        Raises:
            PeerError: A host could not read its rows, or the program does not compile on some host.
            LaunchMismatchError: The hosts launched different programs.
        """
        begin = time.perf_counter()
        if self._program is None:
            self._programs.compile_on_all("eval_step", lambda: self._compile(info.eval_model))
        with self._hosts.scope(f"validation {info.next_step}") as scope:
            sums = {
                name: self._sum(scope, number, info.eval_model, info.next_step)
                for number, name in enumerate(self._sources)
            }
            with scope.launch_on_all("end of validation"):
                pass  # the launches are compared
        self._hosts.phase("training")
        self.metrics = self._figures(sums)
        if self._hosts.is_leader:
            self._tracker.log(
                {**self.metrics, "throughput/eval_duration_s": time.perf_counter() - begin}, step=info.next_step
            )
            shown = ", ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in self.metrics.items())
            log.info("validation after %d steps: %s", info.next_step, shown)

    def _compile(self, model: PyTree) -> Mapping[str, str]:
        first = next(iter(self._sources.values()))
        batch: Mapping[str, Any] = self._place(self._read(first, 0))
        digests: dict[str, str] = {}
        if (reference := self._trainer.reference) is not None:
            compiled = reference.compile(model, batch, microbatches=1)
            digests |= {f"{REFERENCE} {name}": digest for name, digest in compiled.items()}
            batch = reference.structs(batch)
        replicated = NamedSharding(self._mesh, P())
        program = self._programs.compile("eval_step", self._eval_step, [model, batch], out_shardings=replicated)
        self._program = program
        return digests | dict(program.digests)

    def _eval_step(self, model: PyTree, batch: dict[str, Array]) -> Float[Array, " n"]:
        """The sums of one batch: of losses and of each metric, and the weights of both."""
        with hax.axis_mapping(compute_axes(self._mesh)):
            parts = self._loss_fn(pipelined(self._precision.cast_to_compute(model)), batch)
        parts = cast_floats(parts, jnp.dtype(jnp.float32))
        self._names = tuple(parts.metrics)
        weights = [parts.weight, *(parts.weights.get(name, parts.weight) for name in parts.metrics)]
        return jnp.stack([parts.total, *parts.metrics.values(), *weights])

    def _sum(self, scope: Any, number: int, model: PyTree, step: int) -> Float[np.ndarray, " n"]:
        """The sums over all rows of a source, in float64."""
        assert self._program is not None
        rows = list(self._sources.values())[number]
        n_batches = -(-len(rows) // self._batch_size)
        results: list[Array] = []
        for start in range(0, n_batches, BATCHES_AHEAD):
            with scope.run_on_all(f"rows of source {number} from batch {start}"):
                ahead = range(start, min(start + BATCHES_AHEAD, n_batches))
                batches = [self._place(self._read(rows, batch_number)) for batch_number in ahead]
            for batch in batches:
                if self._trainer.reference is not None:
                    batch = self._trainer.reference.add_to(model, batch, step)
                with self._programs.launching("eval_step", step):
                    results.append(jax.block_until_ready(self._program(model, batch)))
        return np.sum([np.asarray(sums.addressable_data(0), np.float64) for sums in results], axis=0)

    def _read(self, rows: ValidationRows, batch: int) -> dict[str, np.ndarray]:
        """This host's rows of a batch; beyond the last row they are empty, without a target."""
        numbers = range(batch * self._batch_size, (batch + 1) * self._batch_size)[self._rows]
        there = [number for number in numbers if number < len(rows)]
        columns = rows.take(there or [0])
        return {
            name: np.concatenate(
                [column[: len(there)], np.zeros((len(numbers) - len(there), *column.shape[1:]), column.dtype)]
            )
            for name, column in columns.items()
        }

    def _place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return {name: place_local(rows, self._sharding, self._batch_size) for name, rows in batch.items()}

    def _figures(self, sums: Mapping[str, Float[np.ndarray, " n"]]) -> dict[str, float]:
        figures = self._named("eval", np.sum(list(sums.values()), axis=0))
        for name, values in sums.items():
            figures |= self._named(f"eval/{name}", values)
        return figures

    def _named(self, prefix: str, sums: Float[np.ndarray, " n"]) -> dict[str, float]:
        totals, weights = np.split(sums, 2)
        with np.errstate(invalid="ignore"):  # a metric of rows that are not there
            loss, *means = (totals / weights).tolist()
        figures = {f"{prefix}/loss": loss}
        if self._perplexity:
            with contextlib.suppress(OverflowError):
                figures[f"{prefix}/perplexity"] = math.exp(loss)
        return figures | {f"{prefix}/{name}": value for name, value in zip(self._names, means, strict=True)}
