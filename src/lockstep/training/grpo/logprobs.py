"""The trainer's log-probabilities of a rollout's tokens: of the model that learns, or of the reference."""

from collections.abc import Mapping
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from lockstep.device import Program, compile_program, fetch
from lockstep.hosts import Ledger
from lockstep.placement import COMPUTE_AXES, data_shards, host_rows, place_local
from lockstep.training.objectives import GrpoConfig
from lockstep.training.precision import Precision
from lockstep.training.step import BATCH_SPEC


class LogprobProgram:
    """Computes the log-probabilities of the tokens of a batch of rows, microbatch by microbatch.

    Args:
        name: The program's name.
        objective: The loss, which says what a log-probability is.
        mesh: The mesh of the run.
        precision: The float types.
        microbatches: The number of parts that the rows are computed in.
        ledger: The ledger that records launches.
    """

    def __init__(
        self,
        name: str,
        objective: GrpoConfig,
        *,
        mesh: Mesh,
        precision: Precision,
        microbatches: int,
        ledger: Ledger,
    ) -> None:
        self._name, self._objective, self._mesh, self._precision = name, objective, mesh, precision
        self._microbatches, self._ledger = microbatches, ledger
        self._program: Program | None = None

    @property
    def traces(self) -> int:
        """The number of times that the program was traced."""
        return 0 if self._program is None else self._program.traces

    def compile(self, model: PyTree, n_rows: int, row_length: int) -> Mapping[str, str]:
        """Compile, unless that is done; nothing is launched, and no other host is waited for.

        Args:
            model: The model whose probabilities are wanted.
            n_rows: The number of rows of a call.
            row_length: The number of tokens of a row.

        Returns:
            The program's digests, which all hosts must compare before the first call.
        """
        if self._program is None:
            tokens = jax.ShapeDtypeStruct(
                (n_rows, row_length), jnp.int32, sharding=NamedSharding(self._mesh, BATCH_SPEC)
            )
            self._program = compile_program(
                self._name,
                self._logprobs,
                [model, tokens],
                mesh=self._mesh,
                ledger=self._ledger,
                out_shardings=NamedSharding(self._mesh, P()),
            )
        return self._program.digests

    def place(self, tokens: Int[np.ndarray, "row position"]) -> Int[Array, "row position"]:
        """Place rows for a call; nothing is launched.

        Args:
            tokens: The token ids of all rows, the same on every host.
        """
        sharding = NamedSharding(self._mesh, BATCH_SPEC)
        return place_local(tokens[host_rows(sharding, len(tokens))], sharding, len(tokens))

    def __call__(self, model: PyTree, tokens: Int[Array, "row position"]) -> Float[np.ndarray, "row position"]:
        """Launch, and wait for the result.

        Args:
            model: The model.
            tokens: The rows as `place` returned them.

        Returns:
            float32, the same on every host; 0 for the first token of a row.
        """
        assert self._program is not None, "compile() comes before the first call"
        return np.pad(fetch(self._program(model, tokens)), ((0, 0), (1, 0)))

    def _logprobs(self, model: PyTree, tokens: Array) -> Array:
        model = self._precision.cast_to_compute(model)
        n_rows, length = tokens.shape
        # As in the train step: each device works on its own rows, whatever the number of microbatches.
        parts = tokens.reshape(data_shards(self._mesh), self._microbatches, -1, length).swapaxes(0, 1)
        parts = jax.lax.with_sharding_constraint(
            parts.reshape(self._microbatches, -1, length), NamedSharding(self._mesh, P(None, *BATCH_SPEC))
        )

        def one(carry: Any, rows: Array) -> tuple[Any, Array]:
            with hax.axis_mapping(COMPUTE_AXES):
                return carry, self._objective.answer_logprobs(model, rows)

        _, found = jax.lax.scan(one, None, parts)
        found = found.reshape(self._microbatches, data_shards(self._mesh), -1, length - 1).swapaxes(0, 1)
        return found.reshape(n_rows, length - 1)
