"""Loads Hugging Face checkpoints into sharded models; a host reads only the bytes that its devices need."""

import concurrent.futures
import contextlib
import difflib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import ResourceMapping
from jax.sharding import Mesh, NamedSharding

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig
from lockstep.models.hf.config import architecture_of, config_from_hf
from lockstep.models.hf.files import CheckpointFiles, local_directory
from lockstep.models.hf.names import Parameter, parameters, skeleton
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.placement import PARAMETER_AXES, aligned_empty

type OnRead = Callable[[int, int], None]
"""Takes the bytes just read on this host, and the bytes that it will read in all."""

_THREADS = 8
_MAX_BYTES_IN_FLIGHT = 256 << 20
"""The most bytes of parameters that are read at a time; one larger parameter is read alone."""
_MIN_BATCHES = 8
"""At most this part of all bytes is read at a time; one larger parameter is read alone."""

# Buffers that older versions of transformers stored; they follow from the configuration.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.masked_bias")


def read_hf_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the parsed ``config.json`` of a checkpoint.

    Args:
        path: The local directory or fsspec URL of the checkpoint.

    Raises:
        ConfigError: The file is missing or is not JSON.
    """
    with local_directory(path, pattern="config.json") as directory:
        file = directory / "config.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no config.json. Give the directory of a Hugging Face checkpoint.")
        try:
            return json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}/config.json is not JSON: {error}. Download the checkpoint again.") from error


def load_config(path: str | os.PathLike[str], *, max_seq_len: int | None = None) -> LlamaConfig:
    """Returns the configuration of a Hugging Face checkpoint.

    Args:
        path: The local directory or fsspec URL of the checkpoint.
        max_seq_len: The longest sequence in tokens, in place of the checkpoint's own limit; needed where that exceeds a
            sliding window. None for the checkpoint's own.

    Raises:
        ConfigError: The configuration cannot be read, as for `read_hf_config` and `config_from_hf`.
    """
    return config_from_hf(read_hf_config(path), max_seq_len=max_seq_len)


def load_hf(
    path: str | os.PathLike[str],
    mesh: Mesh,
    mapping: ResourceMapping = PARAMETER_AXES,
    dtype: Any = jnp.float32,
    *,
    config: LlamaConfig | None = None,
    on_read: OnRead | None = None,
) -> LlamaLMHeadModel:
    """Loads a model with the weights of a Hugging Face checkpoint, sharded over a mesh.

    Every host of the mesh calls it and reads the slices that its own devices need; hosts exchange nothing, and nothing
    is launched. An error may therefore be on one host alone: agree on it (`Hosts.run_on_all`) before the next
    collective. From a URL a host reads the rows of stored tensors that have its slices, in pieces of 8 MiB, eight at a
    time; where a tensor is split along another dimension than its rows, that is all of it.

    Args:
        path: The local directory or fsspec URL with ``config.json`` and safetensors.
        mesh: The mesh of the trainer.
        mapping: The axes of the mesh by names of parameter axes.
        dtype: The dtype of the parameters.
        config: The configuration to use in place of the checkpoint's own, for instance with another ``max_seq_len``;
            None for the checkpoint's own.
        on_read: The function that is called, from several threads, with the bytes of a parameter just placed on this
            host's devices and the bytes of all of them.

    Returns:
        The model.

    Raises:
        ConfigError: Tensors are missing, unexpected or of another shape, each named with its file; the mesh does not
            divide an axis; or the configuration cannot be read, as for `config_from_hf`.
    """
    hf = read_hf_config(path)
    config = config_from_hf(hf) if config is None else config
    model = skeleton(int(hf["vocab_size"]), config)
    with CheckpointFiles(path) as files:
        expected = parameters(model, architecture_of(config).tensors)
        _check_tensors(files, expected, tied=config.tie_word_embeddings)
        shardings = [_sharding(parameter, mesh, mapping) for parameter in expected]
        arrays = _load_all(files, expected, shardings, jnp.dtype(dtype), on_read)
    leaves, structure = jax.tree.flatten(model)
    assert len(leaves) == len(arrays)
    return jax.tree.unflatten(structure, arrays)


def read_block(
    files: CheckpointFiles, parameter: Parameter, index: Sequence[slice], dtype: np.dtype[Any]
) -> np.ndarray:
    """Reads one block of a parameter from the slices of the stored tensors that it covers.

    Args:
        files: The files of the checkpoint.
        parameter: The parameter.
        index: The slice of each axis of the parameter, as a sharding has it for a device.
        dtype: The dtype of the block.
    """
    sizes, axes = parameter.sizes, parameter.value.axes
    where = {a.name: slice(*part.indices(a.size)[:2]) for a, part in zip(axes, index, strict=True)}
    lengths = [where[a.name].stop - where[a.name].start for a in axes]
    block = aligned_empty(lengths, dtype)
    slices = parameter.stored.stored_slices(where, sizes)
    if "layer" not in sizes:
        stored = files.read(parameter.stored.name(None), slices)
        block[...] = parameter.stored.from_stored(stored, where, parameter.axes, sizes)
        return block
    assert axes[0].name == "layer"
    for row, layer in enumerate(range(where["layer"].start, where["layer"].stop)):
        stored = files.read(parameter.stored.name(layer), slices)
        block[row] = parameter.stored.from_stored(stored, where, parameter.axes, sizes)
    return block


def _load_all(
    files: CheckpointFiles,
    expected: Sequence[Parameter],
    shardings: Sequence[NamedSharding],
    dtype: np.dtype[Any],
    on_read: OnRead | None,
) -> list[jax.Array]:
    """Loads several parameters at a time, with only a part of all bytes in flight."""
    sizes = [_local_bytes(p.value.array.shape, s, dtype) for p, s in zip(expected, shardings, strict=True)]
    gate = _Gate(min(_MAX_BYTES_IN_FLIGHT, sum(sizes) // _MIN_BATCHES))

    def one(parameter: Parameter, sharding: NamedSharding, size: int) -> jax.Array:
        with gate.hold(size):
            array = jax.block_until_ready(_load_parameter(files, parameter, sharding, dtype))
        if on_read is not None:
            on_read(size, sum(sizes))
        return array

    with concurrent.futures.ThreadPoolExecutor(_THREADS, "lockstep-load") as pool:
        futures = [pool.submit(one, *each) for each in zip(expected, shardings, sizes, strict=True)]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


class _Gate:
    """A semaphore over bytes: the sizes inside add up to at most the limit; a larger one is inside alone."""

    def __init__(self, limit: int) -> None:
        self._limit, self._in_flight = limit, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight == 0 or self._in_flight + size <= self._limit)
            self._in_flight += size
        try:
            yield
        finally:
            with self._changed:
                self._in_flight -= size
                self._changed.notify_all()


def _local_bytes(shape: tuple[int, ...], sharding: NamedSharding, dtype: np.dtype[Any]) -> int:
    """Returns the bytes of a parameter on this host's devices."""
    return int(np.prod(sharding.shard_shape(shape))) * dtype.itemsize * len(sharding.addressable_devices)


def _load_parameter(
    files: CheckpointFiles, parameter: Parameter, sharding: NamedSharding, dtype: np.dtype[Any]
) -> jax.Array:
    shape = parameter.value.array.shape
    devices_of: dict[tuple[slice, ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        devices_of.setdefault(index, []).append(device)
    shards = []
    for index, devices in devices_of.items():
        block = read_block(files, parameter, index, dtype)
        # The CPU backend takes the block without a copy, so that every device needs one of its own.
        blocks = [block, *(block.copy() for _ in devices[1:])]
        shards += [jax.device_put(*each) for each in zip(blocks, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)


def _sharding(parameter: Parameter, mesh: Mesh, mapping: ResourceMapping) -> NamedSharding:
    spec = hax.partitioning.pspec_for_axis(parameter.value.axes, mapping)
    for axis, names in zip(parameter.value.axes, spec, strict=True):
        names = () if names is None else (names,) if isinstance(names, str) else names
        parts = int(np.prod([mesh.shape[name] for name in names]))
        if axis.size % parts:
            raise ConfigError(
                f"{parameter.path} has axis {axis.name} of size {axis.size}, which mesh axes {', '.join(names)} would "
                f"split into {parts}; the size must be a multiple. Change mesh_shape so that {' x '.join(names)} "
                f"divides {axis.size}."
            )
    return NamedSharding(mesh, spec)


def _check_tensors(files: CheckpointFiles, expected: Iterable[Parameter], *, tied: bool) -> None:
    shapes: Mapping[str, tuple[int, ...]] = dict(item for parameter in expected for item in parameter.tensors())
    # A tied checkpoint may store the embedding a second time.
    ignored = {"lm_head.weight"} if tied else set()
    unexpected = sorted(n for n in files.names - shapes.keys() - ignored if not _DERIVED.fullmatch(n))
    problems = [
        f"tensor {name} of shape {shape} is missing{_nearest(name, unexpected)}"
        for name, shape in shapes.items()
        if name not in files.names
    ]
    problems += [
        f"tensor {name} in {files.file_of(name)} has shape {files.shape(name)}, expected {shape}"
        for name, shape in shapes.items()
        if name in files.names and files.shape(name) != shape
    ]
    problems += [
        f"tensor {name} in {files.file_of(name)} of shape {files.shape(name)} is not part of the model"
        for name in unexpected
    ]
    if problems:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise ConfigError(
            f"the checkpoint in {files.directory} does not fit its configuration: {'; '.join(shown)}. Check "
            "config.json (architectures, sizes, tie_word_embeddings) against the tensors."
        )


def _nearest(name: str, candidates: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.95)
    return f" (there is {match[0]})" if match else ""
