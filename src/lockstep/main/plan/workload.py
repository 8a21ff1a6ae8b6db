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
    """One reason why a configuration cannot run."""

    key: str  # the configuration key to change, with dots; `topology` for the slice itself
    value: Any  # the value of `key`, as given or as it follows from the defaults
    largest: Any  # the largest value of `key` that works; None: none does
    text: str
    place: str = ""  # the `file:line` of the key, or of where to add it


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
    """The train step that a configuration asks for."""

    trainer: TrainerConfig
    optimizer: OptimizerConfig
    loss: LossFn
    columns: Mapping[str, jax.ShapeDtypeStruct]  # the shape and the type of one row of each column of the batch
    row_key: str = "data.max_seq_len"  # the configuration key of the length of a row
    rows: str = "sequences"  # what a row is called in messages: pairs, sequences, answers
    sequences_per_row: int = 1  # number of sequences in a row: 2 for pairs
    reference: bool = False  # whether a frozen copy of the model, in the compute type, is on the devices too
    lora: LoraConfig | None = None  # the adapters, where they alone are trained

    @property
    def length(self) -> int:
        """The number of tokens of a sequence."""
        return int(self.columns["tokens"].shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingWorkload:
    """A round of sampling that a configuration asks for."""

    name: str  # the block of the configuration that asks for it; empty where it is the whole configuration
    engine: EngineConfig
    engine_block: str  # the block that the engine's keys are in
    requests: Sequence[Request]  # prompts of the right lengths; their token ids mean nothing
    vocab_size: int | None = None  # number of token ids that may be sampled; None: all
    steps: int | None = None  # train steps that learn from a round; None: training does not wait for it

    def key(self, name: str) -> str:
        """The key of a setting of this block, with dots, from the root of the configuration."""
        block = self.engine_block if name in {f.name for f in dataclasses.fields(EngineConfig)} else self.name
        return f"{block}.{name}" if block else name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that a configuration asks of the devices, and thus what a plan compiles."""

    command: str
    model: LlamaConfig
    model_key: str
    vocab_size: int
    mesh_shape: str
    dtype: str  # the float type of the weights that are sampled from
    training: TrainingWorkload | None
    sampling: Sequence[SamplingWorkload]
    one_host: bool = False  # whether each host has a mesh of its own
    hosts: int | None = None  # number of processes that the configuration requires; None: any number
    notes: tuple[str, ...] = ()  # what was assumed, a sentence each
    infeasibilities: tuple[Infeasibility, ...] = ()  # known before compiling; all else has values that work

    def calibrated(self, path: str) -> "Workload":
        """The same with a file of measured numbers of the chip for every round of sampling."""
        engines = (dataclasses.replace(each.engine, calibration=path) for each in self.sampling)
        sampling = [
            dataclasses.replace(each, engine=engine) for each, engine in zip(self.sampling, engines, strict=True)
        ]
        return dataclasses.replace(self, sampling=sampling)
