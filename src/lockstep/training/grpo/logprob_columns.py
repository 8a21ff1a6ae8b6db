"""The columns of a rollout that the trainer's own forward pass computes."""

from collections.abc import Collection

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from lockstep.hosts import Hosts, Watchdog, digest, ready_on_all
from lockstep.placement import data_shards
from lockstep.training.config import TrainerConfig
from lockstep.training.grpo.logprobs import LogprobProgram
from lockstep.training.grpo.rollout import Rollout
from lockstep.training.objectives import GrpoConfig

OLD, REFERENCE = "old_logprobs", "reference_logprobs"
"""The columns: of the model before the first update of a rollout, and of the frozen model."""


class LogprobColumns:
    """Has all hosts agree on the rows of a rollout, and fills in the log-probabilities that are wanted.

    Args:
        objective: The loss.
        wanted: Its columns.
        trainer: The settings of the run.
        mesh: The mesh of the run.
        hosts: The processes of the job.
        watchdog: The watchdog of device calls.
        reference: The frozen model; None where there is none.
    """

    def __init__(
        self,
        objective: GrpoConfig,
        wanted: Collection[str],
        trainer: TrainerConfig,
        mesh: Mesh,
        hosts: Hosts,
        watchdog: Watchdog,
        reference: PyTree | None,
    ) -> None:
        self._objective = objective
        self._wanted = [name for name in (OLD, REFERENCE) if name in wanted]
        self._trainer, self._mesh, self._hosts, self._watchdog = trainer, mesh, hosts, watchdog
        self._reference = reference
        self._programs: dict[str, LogprobProgram] = {}

    @property
    def traces(self) -> dict[str, int]:
        """How often each program was traced, by its column."""
        return {name: program.traces for name, program in self._programs.items()}

    def fill(self, rollout: Rollout, model: PyTree) -> None:
        """Agree on the rows, and compute what is wanted; every host calls it.

        Args:
            rollout: The rollout; its columns are changed.
            model: The model that sampled it.

        Raises:
            DisagreementError: The hosts have different rows, programs or results; raised on every host.
            PeerError: A program does not compile on some host; raised on every host.
        """
        models = {OLD: model, REFERENCE: self._reference}
        tokens, mask = rollout.columns["tokens"], rollout.columns["loss_mask"]
        with self._hosts.scope("rollout rows") as scope:
            with scope.run_on_all("rows") as rows:
                rows.agree({name: digest(column.tobytes()) for name, column in rollout.columns.items()})
                for name in self._wanted:
                    rows.agree(self._program(name, len(tokens)).compile(models[name], *tokens.shape))
            if not self._wanted:
                return
            with scope.launch_on_all("log-probabilities", self._hosts.ledger) as computed:
                with ready_on_all(scope, "placing rows"):
                    placed = self._programs[self._wanted[0]].place(tokens)
                found: dict[str, np.ndarray] = {}
                for name in self._wanted:
                    with self._watchdog.watch(name):
                        found[name] = self._programs[name](models[name], placed)
                for name in self._wanted:
                    rollout.columns[name][:] = np.where(mask, found[name], 0.0)
                    computed.agree({name: digest(rollout.columns[name].tobytes())})

    def _program(self, name: str, n_rows: int) -> LogprobProgram:
        if name not in self._programs:
            if self._trainer.per_device_parallelism == "auto":
                # The trainer finds its number by compiling; a forward pass of one row at a time fits beside any.
                microbatches = n_rows // data_shards(self._mesh)
            else:
                microbatches = self._trainer.microbatches(self._mesh) * (n_rows // self._trainer.train_batch_size)
            self._programs[name] = LogprobProgram(
                name,
                self._objective,
                mesh=self._mesh,
                precision=self._trainer.precision,
                microbatches=microbatches,
                ledger=self._hosts.ledger,
            )
        return self._programs[name]
