"""What a configuration asks of the devices, without its data, its weights or its trackers."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from lockstep.engine import EngineConfig
from lockstep.main.plan.infeasibility import Infeasibility
from lockstep.models import LlamaConfig, LoraConfig
from lockstep.training import LossFn, OptimizerConfig, TrainerConfig
from lockstep.types import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingWorkload:
    """The train step that a configuration asks for.

    Args:
        trainer: The batch size, microbatches, mesh and float types.
        optimizer: The optimizer, whose state is on the devices beside the parameters.
        loss: The objective.
        columns: The shape and the type of one row of each column of the batch.
        row_key: The configuration key of the length of a row.
        rows: What a row is called in messages: pairs, sequences, answers.
        sequences_per_row: The number of sequences in a row: 2 for pairs.
        reference: Whether a frozen copy of the model, in the compute type, is on the devices too.
        lora: The adapters, where they alone are trained, with the float type of the frozen weights; None where all
            weights are trained.
    """

    trainer: TrainerConfig
    optimizer: OptimizerConfig
    loss: LossFn
    columns: Mapping[str, jax.ShapeDtypeStruct]
    row_key: str = "data.max_seq_len"
    rows: str = "sequences"
    sequences_per_row: int = 1
    reference: bool = False
    lora: LoraConfig | None = None

    @property
    def length(self) -> int:
        """The number of tokens of a sequence."""
        return int(self.columns["tokens"].shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingWorkload:
    """A round of sampling that a configuration asks for.

    Args:
        name: The block of the configuration that asks for it; empty where it is the whole configuration.
        engine: The capacities and the layout.
        engine_block: The block that the engine's keys are in.
        requests: Prompts of the right lengths; their token ids mean nothing.
        vocab_size: The number of token ids that may be sampled; None: all.
        steps: The number of train steps that learn from what one round samples; None: training does not wait for it.
    """

    name: str
    engine: EngineConfig
    engine_block: str
    requests: Sequence[Request]
    vocab_size: int | None = None
    steps: int | None = None

    def key(self, name: str) -> str:
        """The key of a setting of this block, with dots, from the root of the configuration.

        Args:
            name: The setting's name.
        """
        block = self.engine_block if name in {f.name for f in dataclasses.fields(EngineConfig)} else self.name
        return f"{block}.{name}" if block else name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that a configuration asks of the devices, and thus what a plan compiles.

    Args:
        command: The name of the command that the configuration belongs to.
        model: The shape of the model.
        model_key: The configuration key that names the model.
        vocab_size: The number of rows of the embedding.
        mesh_shape: The shape of the mesh that the model is on, as in the configuration.
        dtype: The float type of the weights that are sampled from.
        training: The train step; None where there is none.
        sampling: The rounds of sampling.
        one_host: Whether each host has a mesh of its own.
        hosts: The number of processes that the configuration requires; None: any number.
        notes: What was assumed, a sentence each.
        infeasibilities: What is wrong already, before anything is compiled. Everything else here is what would be asked
            with the values that work.
    """

    command: str
    model: LlamaConfig
    model_key: str
    vocab_size: int
    mesh_shape: str
    dtype: str
    training: TrainingWorkload | None
    sampling: Sequence[SamplingWorkload]
    one_host: bool = False
    hosts: int | None = None
    notes: tuple[str, ...] = ()
    infeasibilities: tuple[Infeasibility, ...] = ()

    def calibrated(self, path: str) -> "Workload":
        """The same with a file of measured numbers of the chip for every round of sampling.

        Args:
            path: The file.
        """
        engines = (dataclasses.replace(each.engine, calibration=path) for each in self.sampling)
        sampling = [
            dataclasses.replace(each, engine=engine) for each, engine in zip(self.sampling, engines, strict=True)
        ]
        return dataclasses.replace(self, sampling=sampling)
