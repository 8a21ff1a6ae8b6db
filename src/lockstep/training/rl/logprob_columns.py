"""The columns of a rollout that the trainer's own forward pass computes."""

from collections.abc import Collection, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from lockstep.hosts import Hosts, Watchdog, digest, ready_on_all
from lockstep.placement import host_rows, place_local
from lockstep.placement.device import fetch
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.loop.logprobs import LogprobProgram
from lockstep.training.objectives import REFERENCE, GrpoConfig
from lockstep.training.rl.rollout import Rollout
from lockstep.training.step.train_step import BATCH_SPEC

OLD = "old_logprobs"
"""The column of the model before the first update of a rollout."""


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
        self._wanted = [name for name in (OLD, REFERENCE) if name in wanted]
        self._hosts, self._watchdog, self._reference = hosts, watchdog, reference
        self._sharding = NamedSharding(mesh, BATCH_SPEC)

        def answers(model: PyTree, batch: Mapping[str, Array]) -> Array:
            return objective.answer_logprobs(model, batch["tokens"])

        self._programs = {
            name: LogprobProgram(name, answers, trainer=trainer, mesh=mesh, ledger=hosts.ledger, replicated=True)
            for name in self._wanted
        }

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
        structs = {"tokens": jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=self._sharding)}
        with self._hosts.scope("rollout rows") as scope:
            with scope.run_on_all("rows") as rows:
                rows.agree({name: digest(column.tobytes()) for name, column in rollout.columns.items()})
                for name in self._wanted:
                    rows.agree(self._programs[name].compile(models[name], structs))
            if not self._wanted:
                return
            with scope.launch_on_all("log-probabilities", self._hosts.ledger) as computed:
                with ready_on_all(scope, "placing rows"):
                    mine = tokens[host_rows(self._sharding, len(tokens))]
                    placed = {"tokens": place_local(mine, self._sharding, len(tokens))}
                found: dict[str, np.ndarray] = {}
                for name in self._wanted:
                    with self._watchdog.watch(name):
                        found[name] = np.pad(fetch(self._programs[name](models[name], placed)), ((0, 0), (1, 0)))
                for name in self._wanted:
                    rollout.columns[name][:] = np.where(mask, found[name], 0.0)
                    computed.agree({name: digest(rollout.columns[name].tobytes())})
