"""The workload of a configuration: the programs that it asks of the devices, without data, weights or trackers."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml

from lockstep.engine import EngineConfig
from lockstep.models import LlamaConfig, LoraConfig
from lockstep.training import LossFn, OptimizerConfig, TrainerConfig
from lockstep.types import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Infeasibility:
    """One reason why a configuration cannot run.

    Args:
        key: The configuration key to change, with dots; ``topology`` for the slice itself.
        value: The value of ``key``, as given or as it follows from the defaults.
        largest: The largest value of ``key`` that works; None: none does.
        place: The ``file:line`` of the key, or of where to add it.
    """

    key: str
    value: Any
    largest: Any
    text: str
    place: str = ""


class InfeasibleError(Exception):
    """An `Infeasibility`, raised where it is found."""

    def __init__(self, infeasibility: Infeasibility) -> None:
        super().__init__(infeasibility.text)
        self.infeasibility = infeasibility


def with_common_largest(infeasibilities: Sequence[Infeasibility]) -> list[Infeasibility]:
    """The same reasons; those that name the same key get the largest value that works for all of them."""
    found: dict[str, list[Any]] = {}
    for each in infeasibilities:
        found.setdefault(each.key, []).append(each.largest)
    least = {key: None if None in largest else min(largest) for key, largest in found.items()}
    return [dataclasses.replace(each, largest=least[each.key]) for each in infeasibilities]


def place_of(path: Path | None, key: str, overrides: Sequence[str] = ()) -> str:
    """The place where a key is set.

    Args:
        path: The YAML file; None: there is none.
        key: The key, with dots.
        overrides: The keys that were given on the command line, which win over the file.

    Returns:
        ``file:line`` of the key. Where the file does not have the key, that of the innermost block around it that the
        file has, and what to add there.
    """
    if key in overrides:
        return f"--{key} on the command line"
    if path is None:
        return f"--{key}"
    node = yaml.compose(path.read_text(encoding="utf-8"))
    line, missing = 1, key
    parts = key.split(".")
    for depth, part in enumerate(parts):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((name, value) for name, value in entries if name.value == part), None)
        if found is None:
            missing = ".".join(parts[depth:])
            above = ".".join(parts[:depth])
            return f"{path}:{line} (add {missing}{f' to {above}' if above else ''})"
        line, node = found[0].start_mark.line + 1, found[1]
    return f"{path}:{line}"


def largest_in(text: str) -> int | None:
    """The bound of a number that a message has, ``Set it to at most 8192``; None where it has none."""
    found = re.search(r"to at most (\d[\d,]*)", text)
    return int(found[1].replace(",", "")) if found else None


def key_in(text: str, keys: Mapping[str, str]) -> str | None:
    """The first configuration key, with dots, that a message names; None where it names none.

    Args:
        keys: The key with dots, by the name that messages have for it.
    """
    found = [(text.index(name), key) for name, key in keys.items() if name in text]
    return min(found)[1] if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingWorkload:
    """The train step that a configuration asks for.

    Args:
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
        """The key of a setting of this block, with dots, from the root of the configuration."""
        block = self.engine_block if name in {f.name for f in dataclasses.fields(EngineConfig)} else self.name
        return f"{block}.{name}" if block else name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that a configuration asks of the devices, and thus what a plan compiles.

    Args:
        dtype: The float type of the weights that are sampled from.
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
        """The same with a file of measured numbers of the chip for every round of sampling."""
        engines = (dataclasses.replace(each.engine, calibration=path) for each in self.sampling)
        sampling = [
            dataclasses.replace(each, engine=engine) for each, engine in zip(self.sampling, engines, strict=True)
        ]
        return dataclasses.replace(self, sampling=sampling)
