"""What a configuration asks of the devices, without its data, its weights or its trackers."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from lockstep.engine import EngineConfig
from lockstep.models import LlamaConfig
from lockstep.plan.infeasibility import Infeasibility
from lockstep.training import LossFn, OptimizerConfig, TrainerConfig
from lockstep.types import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """The train step.

    Args:
        trainer: batch, microbatches, mesh, float types.
        optimizer: whose state lies beside the parameters.
        loss: the objective.
        columns: shape and type of one row of the batch.
        row_key: configuration key of the length of a row.
        rows: what a row is called: pairs, sequences, answers.
        sequences_per_row: 2 for pairs.
        reference: whether a frozen copy of the model in the compute type lies beside it.
    """

    trainer: TrainerConfig
    optimizer: OptimizerConfig
    loss: LossFn
    columns: Mapping[str, jax.ShapeDtypeStruct]
    row_key: str = "data.max_seq_len"
    rows: str = "sequences"
    sequences_per_row: int = 1
    reference: bool = False

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return int(self.columns["tokens"].shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingWork:
    """A round of sampling.

    Args:
        name: of the block of the configuration that asks for it; empty where it is the whole configuration.
        engine: capacities and layout.
        engine_block: where the engine's keys are.
        requests: prompts by their lengths; the token ids mean nothing.
        vocab_size: token ids that may be sampled; None for all.
    """

    name: str
    engine: EngineConfig
    engine_block: str
    requests: Sequence[Request]
    vocab_size: int | None = None

    def key(self, name: str) -> str:
        """Of a setting of this block, from the root of the configuration."""
        block = self.engine_block if name in {f.name for f in dataclasses.fields(EngineConfig)} else self.name
        return f"{block}.{name}" if block else name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """All that a plan compiles.

    Args:
        command: that the configuration belongs to.
        model: its shape.
        model_key: key of the configuration that names the model.
        vocab_size: rows of the embedding.
        mesh_shape: of the mesh that the model lies on.
        dtype: of the parameters.
        training: the train step, if there is one.
        sampling: rounds of sampling, by what they are for.
        one_host: whether each host has a mesh of its own.
        hosts: processes that the configuration asks for; None if it does not say.
        notes: what was assumed.
        refusals: what is wrong already, before anything is compiled. The rest is described with values that work.
    """

    command: str
    model: LlamaConfig
    model_key: str
    vocab_size: int
    mesh_shape: str
    dtype: str
    training: TrainingWork | None
    sampling: Sequence[SamplingWork]
    one_host: bool = False
    hosts: int | None = None
    notes: tuple[str, ...] = ()
    refusals: tuple[Infeasibility, ...] = ()
