"""Saves a sharded model as a Hugging Face checkpoint: all hosts gather its tensors, the leader writes them."""

import contextlib
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from safetensors.numpy import save_file

from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, Watchdog, current, leader_only
from lockstep.models.hf.config import architecture_of, config_to_hf
from lockstep.models.hf.files import INDEX_NAME, SINGLE_NAME
from lockstep.models.hf.names import Parameter, parameters
from lockstep.models.llama import LlamaLMHeadModel


class SavesTokenizer(Protocol):
    """The part of a transformers tokenizer that `save_hf` uses."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Writes the tokenizer's files to a directory."""


def save_hf(
    model: LlamaLMHeadModel,
    path: str | os.PathLike[str],
    *,
    tokenizer: SavesTokenizer | None = None,
    max_shard_bytes: int = 5 * 10**9,
    dtype: Any = None,
    hosts: Hosts | None = None,
) -> None:
    """Saves a model as a Hugging Face checkpoint: safetensors, an index where there are several files, config.json.

    Every host calls it. One layer's tensor at a time is gathered, by a program that every host launches. The leader has
    the tensors of one file in memory and writes to a temporary directory next to ``path``, which is renamed to ``path``
    when it is complete. After every file an error of the leader is raised on every host.

    Args:
        model: The model, in any sharding.
        path: The local directory on the leader: absent, empty, or a checkpoint, which is replaced.
        tokenizer: The tokenizer to save with the model; its special tokens go into config.json. None for none.
        max_shard_bytes: The most bytes of tensors in a file; a larger tensor gets a file of its own.
        dtype: The dtype of the stored tensors; None keeps that of each parameter.
        hosts: The hosts of the job; None for ``lockstep.hosts.current()``.

    Raises:
        PeerError: The leader could not write; its own error is the cause there.
        ConfigError: ``path`` is a URL, or no Hugging Face architecture computes the model.
    """
    if "://" in str(path):
        raise ConfigError(f"the path to save to is {path}; it must be a local directory. Save there, then copy it.")
    config_to_hf(model.config, model.Vocab.size)  # refuses a model that no Hugging Face architecture computes
    hosts = current() if hosts is None else hosts
    target = pathlib.Path(path).expanduser().absolute()
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    files = _plan_files(_tensors(model, dtype), max_shard_bytes)
    watchdog = Watchdog(hosts, hosts.timeout_s)
    with hosts.scope("save_hf") as scope, _removed_at_the_end(temporary, enabled=hosts.is_leader):

        def leader_does(name: str, work: Callable[[], object]) -> None:
            with scope.run_on_all(name, "saving"):
                if hosts.is_leader:
                    with leader_only():
                        work()

        leader_does("prepare", lambda: _prepare(target, temporary))
        for file, tensors in files.items():
            gathered: dict[str, np.ndarray] = {}
            for tensor in tensors:
                with watchdog.watch(f"gathering {tensor.name}"):
                    whole = tensor.gather()
                if hosts.is_leader:
                    gathered[tensor.name] = tensor.to_stored(whole)
            leader_does(file, functools.partial(save_file, gathered, temporary / file, metadata={"format": "pt"}))
        leader_does("finish", lambda: _finish(model, tokenizer, files, temporary, target))


class _Tensor:
    """One tensor to write: a parameter, or a layer of one."""

    def __init__(self, parameter: Parameter, layer: int | None, dtype: Any):
        self.parameter, self.layer = parameter, layer
        self.name = parameter.stored.name(layer)
        self.dtype = np.dtype(parameter.value.array.dtype if dtype is None else dtype)
        self.nbytes = math.prod(parameter.stored.shape(parameter.sizes)) * self.dtype.itemsize

    def gather(self) -> jax.Array:
        """Gathers the tensor on every device, by a program that every host launches."""
        array = self.parameter.value.array
        layer = None if self.layer is None else np.int32(self.layer)
        whole = _gather_program(_replicated(array.sharding), self.dtype)(array, layer)
        # Waiting here bounds the devices to two gathered tensors.
        return whole.block_until_ready()

    def to_stored(self, whole: jax.Array) -> np.ndarray:
        """Converts what `gather` returned to what Hugging Face stores, without a launch."""
        local = np.asarray(whole.addressable_data(0))
        return self.parameter.stored.to_stored(local, self.parameter.axes, self.parameter.sizes)


@functools.cache
def _gather_program(out: Sharding, dtype: np.dtype[Any]) -> Callable[[jax.Array, np.int32 | None], jax.Array]:
    def gather(array: jax.Array, layer: np.int32 | None) -> jax.Array:
        part = array if layer is None else jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        return part.astype(dtype)

    return jax.jit(gather, out_shardings=out)


def _replicated(sharding: Sharding) -> Sharding:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _tensors(model: LlamaLMHeadModel, dtype: Any) -> list[_Tensor]:
    """Returns all tensors, sorted by layer, so that those of a layer are in one file where possible."""
    every = parameters(model, architecture_of(model.config).tensors)
    tensors = [_Tensor(each, layer, dtype) for each in every for layer in each.layers]
    return sorted(tensors, key=lambda t: -1 if t.layer is None else t.layer)


def _plan_files(tensors: list[_Tensor], max_bytes: int) -> dict[str, list[_Tensor]]:
    groups: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t.nbytes for t in groups[-1]) + tensor.nbytes > max_bytes:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _prepare(target: pathlib.Path, temporary: pathlib.Path) -> None:
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file; save_hf writes a directory. Choose another path.")
    # Replacing removes all files, so it has to be a checkpoint.
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise ConfigError(
            f"{target} is there and is not a checkpoint (no config.json); save_hf would replace it whole. Choose "
            "another path, or remove it yourself."
        )
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _finish(
    model: LlamaLMHeadModel,
    tokenizer: SavesTokenizer | None,
    files: dict[str, list[_Tensor]],
    temporary: pathlib.Path,
    target: pathlib.Path,
) -> None:
    tensors = [t for group in files.values() for t in group]
    if len(files) > 1:
        weight_map = {t.name: file for file, group in files.items() for t in group}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
        (temporary / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(temporary))
    config = config_to_hf(model.config, model.Vocab.size)
    config["torch_dtype"] = max(tensors, key=lambda t: t.nbytes).dtype.name
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[token] = getattr(tokenizer, token, None)
    (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _removed_at_the_end(directory: pathlib.Path, *, enabled: bool) -> Iterator[None]:
    try:
        yield
    finally:
        if enabled:
            shutil.rmtree(directory, ignore_errors=True)
