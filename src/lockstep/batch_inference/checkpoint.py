"""The checkpoint of a job: a Hugging Face one, or what a training run of lockstep saved."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.batch_inference.config import SampleConfig
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts
from lockstep.json_text import parse_json
from lockstep.limits import read_small
from lockstep.models import (
    LlamaLMHeadModel,
    LoraModel,
    config_from_hf,
    fingerprint,
    load_hf,
    read_hf_config,
    read_vocab_size,
)
from lockstep.text import ModelLimits
from lockstep.training import SavedModel, has_checkpoint, saved_at, saved_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfCheckpoint:
    """A Hugging Face checkpoint."""

    path: str

    @property
    def tokenizer(self) -> str:
        """The tokenizer beside it."""
        return self.path

    @property
    def described_at(self) -> str:
        """The place of the files that say where an answer ends."""
        return self.path

    def limits(self) -> ModelLimits:
        """Return what its model can take."""
        config = config_from_hf(read_hf_config(self.path))
        return ModelLimits(rows=read_vocab_size(self.path), max_seq_len=config.max_seq_len)

    def fingerprint(self) -> str:
        """Return a digest that differs between checkpoints, see `fingerprint`."""
        return fingerprint(self.path)


_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


type Checkpoint = HfCheckpoint | SavedModel
"""A model to sample from: a Hugging Face checkpoint, or the model in one that a training run goes on from."""


def resolve_checkpoint(config: SampleConfig) -> Checkpoint:
    """Return the checkpoint that a configuration names; nothing is launched.

    Args:
        config: The configuration of the run. The newest of several checkpoints in the directory
            ``checkpoint_path`` is returned.

    Raises:
        ConfigError: There is no such checkpoint, or it does not say what its model is.
    """
    if config.hf_checkpoint is not None:
        return HfCheckpoint(path=config.hf_checkpoint)
    assert config.checkpoint_path is not None
    return checkpoint_at(config.checkpoint_path, base_model=config.base_model)


def checkpoint_at(path: str, key: str = "checkpoint_path", base_model: str | None = None) -> Checkpoint:
    """Return the checkpoint at a place, of whichever kind it is.

    Args:
        path: What ``checkpoint_path`` may be. The newest of several checkpoints in it is returned.
        key: The key that the path was given by, for errors.
        base_model: The base model of adapters, as `saved_model` takes it.

    Raises:
        ConfigError: There is no such checkpoint, or it does not say what its model is.
    """
    checkpoint = _checkpoint_at(path, key, base_model)
    if base_model is not None and isinstance(checkpoint, HfCheckpoint):
        raise ConfigError(f"base_model is {base_model!r}, and {checkpoint.path} has no adapters. Remove it.")
    return checkpoint


def _checkpoint_at(path: str, key: str, base_model: str | None) -> Checkpoint:
    if "://" in path:
        return saved_model(path, base_model=base_model) if has_checkpoint(path) else HfCheckpoint(path=path)
    if any((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json")) or Path(path).is_file():
        return HfCheckpoint(path=path)  # which says what is wrong with it
    if not Path(path).is_dir():
        raise ConfigError(
            f"{key} is {path!r}, and there is no such directory. Give the run directory of a training run "
            "with hf_save_path or a checkpointer, the directory of several, or the checkpoint itself. `make demo` "
            "writes one below runs."
        )
    if re.fullmatch(r"step-\d+", Path(path).name) and has_checkpoint(path):
        return saved_model(path, base_model=base_model)
    candidates = _found(Path(path), base_model) or [
        candidate for run in Path(path).iterdir() if run.is_dir() for candidate in _found(run, base_model)
    ]
    if not candidates and any(file.suffix in _WEIGHTS for file in Path(path).iterdir()):
        return HfCheckpoint(path=path)
    if not candidates:
        raise ConfigError(
            f"{key} is {path!r}, which has no checkpoint: no config.json of a Hugging Face checkpoint there, "
            "one directory below or two, and none that a training run goes on from. Train with hf_save_path (for "
            "instance hf_save_path: checkpoint) or with trainer.checkpointer, and give the run directory. `make demo` "
            "does so."
        )
    _, make = max(candidates, key=lambda candidate: candidate[0])
    return make()


def stored_dtype(hf: Mapping[str, Any]) -> str:
    """Return the name of the float type of the weights, from the contents of a checkpoint's ``config.json``."""
    named = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    return named if named in ("float32", "bfloat16", "float16") else "float32"


def _found(run: Path, base_model: str | None) -> list[tuple[float, Callable[[], Checkpoint]]]:
    """Return the checkpoints inside a run directory: when each was complete, and what reads its description."""
    checkpoints: list[tuple[float, Callable[[], Checkpoint]]] = [
        (config_file.stat().st_mtime, functools.partial(HfCheckpoint, path=str(config_file.parent)))
        for config_file in run.glob("*/config.json")
        if _is_model(config_file)
    ]
    for directory in (run, run / "checkpoints"):
        if has_checkpoint(str(directory)):
            checkpoints.append(
                (saved_at(str(directory)), functools.partial(saved_model, str(directory), base_model=base_model))
            )
            break
    return checkpoints


def _is_model(config: Path) -> bool:
    try:
        return "architectures" in parse_json(read_small(config), str(config), dict, "")
    except (OSError, ConfigError):
        return False


def load(
    hosts: Hosts, checkpoint: Checkpoint, mesh: Mesh, dtype: str | None
) -> tuple[LlamaLMHeadModel | LoraModel, int, float]:
    """Load the model of a checkpoint on a mesh.

    Args:
        mesh: A mesh of all devices, or of this host's.
        dtype: The float type of the weights; None for the one in which they are stored. Those with adapters keep that
            of the training run, so that they are merged as they were there.

    Returns:
        The model, the bytes that this host read, and the seconds until the last host had its part.

    Raises:
        PeerError: A host could not read its part; raised on every host.
    """
    start = time.monotonic()
    read: list[int] = []
    if isinstance(checkpoint, SavedModel):
        base: LlamaLMHeadModel | None = None
        if checkpoint.adapters is not None:
            with hosts.run_on_all("finding the base model"):
                path = checkpoint.checked_base()
            base = load_hf(path, mesh, dtype=jnp.dtype(checkpoint.dtype), config=checkpoint.config, hosts=hosts)
        with hosts.run_on_all("reading the training checkpoint", f"reading {checkpoint.path}"):
            trained = jax.block_until_ready(checkpoint.read(mesh, dtype or checkpoint.dtype, base))
        return trained, _local_bytes(trained), time.monotonic() - start
    with hosts.run_on_all("reading the checkpoint's config.json"):
        stored = dtype or stored_dtype(read_hf_config(checkpoint.path))
    model = load_hf(
        checkpoint.path, mesh, dtype=jnp.dtype(stored), on_read=lambda new, _: read.append(new), hosts=hosts
    )
    return model, sum(read), time.monotonic() - start


def _local_bytes(model: LlamaLMHeadModel | LoraModel) -> int:
    """The bytes of the parts that this host's devices hold, each part once."""
    parts = [{str(shard.index): shard.data for shard in leaf.addressable_shards} for leaf in jax.tree.leaves(model)]
    return sum(part.nbytes for different in parts for part in different.values())
