"""A rollout as training uses it: rows with advantages and log-probabilities, and which of them each update has."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from lockstep.errors import ConfigError
from lockstep.hosts import digest, ready_on_all
from lockstep.json_text import typed
from lockstep.placement import data_shards
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.loop.logprobs import LogprobProgram
from lockstep.training.objectives import REFERENCE, ROUTING, TEACHER, GrpoConfig, with_routing
from lockstep.training.rl.packing import Packing, packed_columns
from lockstep.training.rl.segments import Sample
from lockstep.training.step.programs import Programs
from lockstep.training.step.train_step import batch_structs


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """The answers of one rollout; the same on every host.

    Args:
        lengths: The number of tokens of each row that are no padding.
    """

    number: int
    columns: Mapping[str, np.ndarray]
    lengths: np.ndarray

    def packing(self, answers: slice, shards: int, *, learned: bool = False) -> Packing:
        """Return the places of some answers in packed rows.

        Args:
            shards: The number of equal parts that the rows are split into over the devices.
            learned: Whether answers without targets are left out.
        """
        lengths, mask = self.lengths[answers], self.columns["loss_mask"][answers]
        lengths = np.where(mask.any(axis=1), lengths, 0) if learned else lengths
        return Packing.of(lengths, mask.shape[1], shards)

    def minibatch(self, update: int, batch_size: int) -> slice:
        """Return the answers of an update: each iteration takes all minibatches in the same order."""
        begin = (update * batch_size) % len(self.lengths)
        return slice(begin, begin + batch_size)

    def state(self) -> dict[str, Any]:
        """Return everything, for a checkpoint in the middle of its updates."""
        return {"number": self.number, "lengths": self.lengths, "columns": dict(self.columns)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Rollout":
        """Return what `state` was called on, bit for bit."""
        columns = typed(dict[str, np.ndarray], state["columns"])
        return cls(number=typed(int, state["number"]), lengths=typed(np.ndarray, state["lengths"]), columns=columns)


def make_columns(
    columns: Mapping[str, jax.ShapeDtypeStruct],
    samples: Sequence[Sample],
    advantages: Float[np.ndarray, " answer"],
    learned: Bool[np.ndarray, " answer"] | None = None,
) -> dict[str, np.ndarray]:
    """Return the rows of samples by column, the sample as axis 0: its segments one after the other, padding.

    Args:
        columns: Shape and type of one row of each column, as `GrpoConfig.columns` returned them. Columns of
            log-probabilities that the trainer computes are zeros here.
        learned: Whether a sample is learned from, else it has no targets; None: all are.

    Raises:
        ConfigError: An answer does not say what its tokens were drawn with, or which experts they were given to.
    """
    rows: dict[str, Any] = {
        name: np.zeros((len(samples), *column.shape), column.dtype) for name, column in columns.items()
    }
    routing = [name for name in ROUTING if name in columns]
    for name in routing:
        rows[name][:] = -1
    for row, sample in enumerate(samples):
        end, num_routed = 0, 0
        for segment in sample:
            begin, end = end, end + len(segment.tokens)
            rows["tokens"][row, begin:end] = segment.tokens
            if (completion := segment.completion) is None:
                continue
            if len(completion.sampled_logprobs) != len(completion.tokens):
                raise ConfigError(
                    f"an answer of the engine has {len(completion.tokens)} tokens and "
                    f"{len(completion.sampled_logprobs)} sampled_logprobs; training needs the log-probability that "
                    "each token was drawn with. Have the engine set Completion.sampled_logprobs."
                )
            rows["loss_mask"][row, begin:end] = learned is None or learned[row]
            rows["rollout_logprobs"][row, begin:end] = completion.sampled_logprobs
            for name in routing:
                if completion.routed_experts is not None:
                    # A later answer has the experts of all before it, read again perhaps: those of the reading count
                    # in which the tokens were drawn.
                    rows[name][row, num_routed : end - 1] = completion.routed_experts.numbers()[num_routed:]
                elif ROUTING[name] and completion.tokens:
                    raise ConfigError(
                        "rollout.replay_routing is true and an answer of the engine has no routed_experts. Have the "
                        "engine set Completion.routed_experts, or set rollout.replay_routing to false."
                    )
            num_routed = end - 1
    rows["advantage"][:] = advantages
    return rows


def answer_mask(samples: Sequence[Sample], row_length: int) -> Bool[np.ndarray, "answer position"]:
    """Return which tokens of each row are those of answers, whether they are learned from or not."""
    mask = np.zeros((len(samples), row_length), bool)
    for row, sample in enumerate(samples):
        end = 0
        for segment in sample:
            begin, end = end, end + len(segment.tokens)
            mask[row, begin:end] = segment.completion is not None
    return mask


_READ: Final = ("tokens", "segment_ids", "loss_mask")  # the columns that log-probabilities are computed from
OLD = "old_logprobs"  # the column of the model before the first update of a rollout


class FrozenModels(NamedTuple):
    """The models that a loss compares the trained one with, in the compute type."""

    reference: PyTree | None = None
    """None without ``kl_coefficient``."""
    teacher: PyTree | None = None
    """The model that the loss learns from; None without ``teacher_coefficient``."""


class LogprobColumns:
    """Has all hosts agree on the rows of a rollout, and fills in the log-probabilities that are wanted."""

    def __init__(
        self,
        objective: GrpoConfig,
        columns: Collection[str],
        trainer: TrainerConfig,
        programs: Programs,
        frozen: FrozenModels,
    ) -> None:
        self._wanted = [name for name in (OLD, REFERENCE, TEACHER) if name in columns]
        self._hosts, self._mesh = programs.hosts, programs.mesh
        self._n_rows, self._frozen = trainer.train_batch_size, frozen
        self._replayed = [name for name, replayed in ROUTING.items() if replayed and name in columns]

        def answers(model: PyTree, batch: Mapping[str, Array]) -> Array:
            return objective.answer_logprobs(with_routing(model, batch), *(batch[name] for name in _READ))

        self._programs = {
            name: LogprobProgram(name, answers, trainer=trainer, programs=programs, replicated=True)
            for name in self._wanted
        }

    @property
    def traces(self) -> dict[str, int]:
        """Traces of each program, by its column."""
        return {name: program.traces for name, program in self._programs.items()}

    def use_reference(self, model: PyTree) -> None:
        """Take another reference model."""
        self._frozen = self._frozen._replace(reference=model)

    def fill(self, rollout: Rollout, model: PyTree, answers: Bool[np.ndarray, "row position"]) -> None:
        """Agree on the rows, and compute what is wanted; every host calls it.

        Args:
            answers: Where the columns are filled in: the tokens of the answers, see `answer_mask`.

        Raises:
            DisagreementError: The hosts have different rows, programs or results; raised on every host.
            PeerError: A program does not compile on some host; raised on every host.
        """
        models = {OLD: model, REFERENCE: self._frozen.reference, TEACHER: self._frozen.teacher}
        # The reference model takes its own experts: it is the policy of another time. So does the teacher.
        reads = {OLD: [*_READ, *self._replayed], REFERENCE: _READ, TEACHER: _READ}
        columns = {name: rollout.columns[name] for name in ("tokens", *self._replayed)} | {"loss_mask": answers}
        minibatches = [slice(begin, begin + self._n_rows) for begin in range(0, len(answers), self._n_rows)]
        structs = batch_structs(
            packed_columns(
                {name: jax.ShapeDtypeStruct(column.shape[1:], column.dtype) for name, column in columns.items()}
            ),
            self._n_rows,
            self._mesh,
        )
        with self._hosts.scope("rollout rows") as scope:
            with scope.run_on_all("rows") as rows:
                agreed = {**rollout.columns, "lengths": rollout.lengths}
                rows.agree({name: digest(column.tobytes()) for name, column in agreed.items()})
                for name in self._wanted:
                    rows.agree(
                        self._programs[name].compile(
                            models[name], {input_name: structs[input_name] for input_name in reads[name]}
                        )
                    )
            if not self._wanted:
                return
            with scope.launch_on_all("log-probabilities", self._hosts.ledger) as computed:
                for minibatch in minibatches:
                    with ready_on_all(scope, "placing rows"):
                        packing = rollout.packing(minibatch, data_shards(self._mesh))
                        placed = packing.place(
                            {name: column[minibatch] for name, column in columns.items()}, self._mesh
                        )
                    for name in self._wanted:
                        read = {input_name: placed[input_name] for input_name in reads[name]}
                        logprobs = np.pad(self._programs[name].fetch(models[name], read), ((0, 0), (1, 0)))
                        masked = np.where(answers[minibatch], packing.unpack(logprobs), 0.0)
                        rollout.columns[name][minibatch] = masked
                computed.agree({name: digest(rollout.columns[name].tobytes()) for name in self._wanted})
