"""Loads Hugging Face checkpoints into sharded models; the hosts read every byte once between them."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import ResourceMapping
from jax.sharding import Mesh, NamedSharding

from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, Ledger, MemoryClient, Phase, Watchdog, current, digest, ready_on_all
from lockstep.json_text import parse_json
from lockstep.limits import read_small
from lockstep.models.config import LlamaConfig
from lockstep.models.families.registry import (
    config_from_hf,
    family_of,
    family_of_hf,
    text_part,
    vocab_size_from_hf,
)
from lockstep.models.hf.files import (
    ADAPTER_NAME,
    CONFIG_NAME,
    CheckpointFiles,
    check_is_model,
    files_in,
    has_tensors,
    local_directory,
    other_format,
    pack_heads,
    read_heads,
    unpack_heads,
)
from lockstep.models.hf.fit import check_tensors
from lockstep.models.hf.names import Parameter, parameters, stored_shapes
from lockstep.models.hf.row_layout import ReadingHosts, RowLayout
from lockstep.models.hf.row_reader import ParallelReader, ParameterRead
from lockstep.models.hf.scorer import scorer_config, with_score
from lockstep.models.hf.stored_names import HEAD
from lockstep.models.hf.tied_head import has_own_head
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.trainable import skeleton
from lockstep.placement import PARAMETER_AXES, axes_of
from lockstep.placement.device import Program, compile_program
from lockstep.printable import bytes_text, get_logger
from lockstep.storage import HUB_WAIT_S
from lockstep.urls import url_to_fs

type OnRead = Callable[[int, int], None]
"""Takes the bytes that this host has just read, and those that it will read in all."""

LOG_INTERVAL_S = 5.0
"""Seconds between two lines of the log about loading."""

log = get_logger(__name__)


class LoadProgress:
    """Counts bytes as they are read; the leader logs how many, how fast, and who is last.

    Args:
        on_read: The function that is called with the bytes that were read; None for none.
    """

    def __init__(self, hosts: Hosts, total: int, on_read: OnRead | None) -> None:
        self._hosts, self._total, self._on_read = hosts, total, on_read
        self._bytes = 0
        self._start = self._last = time.monotonic()
        self._done = False

    def note(self, bytes_read: int) -> float:
        """Take the bytes that this host has read so far; return which part of all of its bytes that is."""
        if self._on_read is not None and bytes_read > self._bytes:
            self._on_read(bytes_read - self._bytes, self._total)
        self._bytes = bytes_read
        self._hosts.phase(f"loading the checkpoint, {bytes_text(bytes_read)} of {bytes_text(self._total)} read")
        return bytes_read / self._total if self._total else 1.0

    def show(self, parts: Sequence[float]) -> None:
        """Logs, on the leader and every few seconds, what this host has read and the part of the last host.

        Args:
            parts: The part of its bytes that each host has read, by process number.
        """
        now, slowest = time.monotonic(), min(range(len(parts)), key=lambda process: parts[process])
        done = parts[slowest] >= 1.0
        if not self._hosts.is_leader or self._done or (now - self._last < LOG_INTERVAL_S and not done):
            return
        self._last, self._done = now, done
        rate = bytes_text(round(self._bytes / max(now - self._start, 1e-9)))
        last = f"; process {slowest} is last with {parts[slowest]:.0%}" if not done else ""
        log.info("loading: %s of %s on this host, %s/s%s", bytes_text(self._bytes), bytes_text(self._total), rate, last)


_MAX_BYTES_IN_MEMORY = 256 << 20
"""The most bytes of parameters that wait in a host's memory; one larger parameter is alone."""
_MIN_BATCHES = 8
"""At most this part of what a host reads waits in its memory; one larger parameter is alone."""
_INTERVAL_S = 1.0
"""Seconds after which the hosts hear of each other while they read."""


def read_hf_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the parsed ``config.json`` of a checkpoint; of a model that reads images too, that of its language model.

    Raises:
        ConfigError: The file is missing or is not JSON.
    """
    with local_directory(path, pattern=CONFIG_NAME) as directory:
        file = directory / CONFIG_NAME
        if (directory / ADAPTER_NAME).exists():
            check_is_model(path, [ADAPTER_NAME])
        return _parsed_config(read_small(file) if file.exists() else None, path)


def _parsed_config(text: bytes | None, path: str | os.PathLike[str]) -> dict[str, Any]:
    if text is None:
        filesystem, root = url_to_fs(path)
        check_is_model(path, files_in(filesystem, root.rstrip("/")))
        raise ConfigError(f"{path} has no config.json. {other_format(filesystem, root.rstrip('/'))}")
    return dict(text_part(parse_json(text, f"{path}/config.json", dict, "Download the checkpoint again.")))


def read_vocab_size(path: str | os.PathLike[str]) -> int:
    """Return the number of rows of the embedding of a checkpoint.

    Raises:
        ConfigError: The configuration cannot be read, or does not say it.
    """
    return vocab_size_from_hf(read_hf_config(path))


def load_config(path: str | os.PathLike[str], *, max_seq_len: int | None = None, scorer: bool = False) -> LlamaConfig:
    """Return the configuration of a Hugging Face checkpoint.

    A tied output layer that is stored with other values than the embedding is not tied, as in transformers 5; the
    tensors need not be there.

    Args:
        max_seq_len: The longest sequence in tokens, in place of the checkpoint's own limit. None for that.
        scorer: Whether the checkpoint is a sequence classifier with one label, see `load_hf`.

    Raises:
        ConfigError: The configuration cannot be read, as for `read_hf_config` and `config_from_hf`.
    """
    hf = read_hf_config(path)
    config = config_from_hf(scorer_config(hf, os.fspath(path)) if scorer else hf, max_seq_len=max_seq_len)
    if config.tie_word_embeddings and has_tensors(path) and has_own_head(CheckpointFiles(path, tied=True)):
        return _untied(config, path)
    return config


def _untied(config: LlamaConfig, path: str | os.PathLike[str]) -> LlamaConfig:
    log.warning(
        "%s: config.json has tie_word_embeddings, and %s is stored with other values than the embedding; they are not "
        "tied, as in transformers",
        os.fspath(path),
        HEAD,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def check_hf(path: str | os.PathLike[str]) -> LlamaConfig:
    """Check a checkpoint as `load_hf` does, by its configuration and the headers of its files; no weight is read.

    Returns:
        The configuration.

    Raises:
        ConfigError: `load_hf` would raise it for any mesh.
    """
    hf, config = read_hf_config(path), load_config(path)
    tied = config.tie_word_embeddings
    expected = parameters(skeleton(vocab_size_from_hf(hf), config), family_of_hf(hf).tensors)
    files = CheckpointFiles(path, tied=tied)
    check_tensors(files, expected, tied=tied)
    files.check_sizes()
    return config


def load_hf(
    path: str | os.PathLike[str],
    mesh: Mesh,
    mapping: ResourceMapping = PARAMETER_AXES,
    dtype: Any = jnp.float32,
    *,
    config: LlamaConfig | None = None,
    on_read: OnRead | None = None,
    hosts: Hosts | None = None,
    scorer: bool = False,
) -> LlamaLMHeadModel:
    """Load a model with the weights of a Hugging Face checkpoint, sharded over a mesh.

    Each device reads rows of its own of every stored tensor, so that the hosts of a mesh read every byte once between
    them, in requests of at most 8 MiB, eight at a time; of more than 32 hosts, at most 32 read, each for a group of
    them. One program per parameter then moves it to its sharding; all hosts launch it as soon as the last of them has
    read its rows. While hosts read, they hear of each other every
    second, so however long it takes, nobody waits in vain: a host gives up where nothing came for ``hosts.timeout_s``.

    Args:
        path: The local directory or fsspec URL with ``config.json`` and safetensors.
        mesh: The mesh of the trainer. Every host with a device in it makes this call.
        mapping: The axes of the mesh by names of parameter axes.
        config: The configuration to use in place of the checkpoint's own, for instance with another ``max_seq_len``;
            None for the checkpoint's own.
        on_read: The function that is called, about every second, with the bytes that this host has read since the last
            call, and those that it will read in all.
        hosts: The hosts that load together, each of which makes this call, on one mesh or each on its own. None for
            ``lockstep.hosts.current()``, or for this host alone where the mesh is on no other.
        scorer: Whether the checkpoint is a sequence classifier with one label, such as a reward model. Its output layer
            has one column, the score, and ``mapping`` has nothing for "vocab".

    Returns:
        The model.

    Raises:
        ConfigError: Tensors are missing, unexpected or of another shape, each named with its file; the mesh does not
            divide an axis; or the configuration cannot be read, as for `config_from_hf`.
        PeerError: One of several hosts could not read its part, or one of given ``hosts``; that host's own error is
            its cause.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     saved = lockstep.models.save_hf(model, f"{directory}/model")
        ...     loaded = lockstep.models.load_hf(f"{directory}/model", mesh)
        >>> loaded.embed.axes == model.embed.axes
        True
    """
    processes = {device.process_index for device in mesh.devices.flat}
    alone = hosts is None and processes == {jax.process_index()}
    if alone:
        hosts = Hosts(MemoryClient.hub(1)[0])
    try:
        with (current() if hosts is None else hosts).scope("loading the checkpoint") as scope:
            return _Loading(scope, mesh, jnp.dtype(dtype), on_read, scorer).load(path, mapping, config)
    except PeerError as error:
        if alone and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


class _Loading:
    """One call of `load_hf`, between the hosts that make it together."""

    def __init__(
        self, hosts: Hosts, mesh: Mesh, dtype: np.dtype[Any], on_read: OnRead | None, scorer: bool = False
    ) -> None:
        self._scorer = scorer
        self._hosts, self._mesh, self._dtype, self._on_read = hosts, mesh, dtype, on_read
        self._together = any(device.process_index != jax.process_index() for device in mesh.devices.flat)
        self._readers = ReadingHosts.of(mesh)
        # What hosts launch on meshes of their own is not the job's.
        self._ledger = hosts.ledger if self._together else Ledger()
        self._watchdog = Watchdog(hosts, hosts.timeout_s) if self._together else None

    def load(
        self, path: str | os.PathLike[str], mapping: ResourceMapping, config: LlamaConfig | None
    ) -> LlamaLMHeadModel:
        place, shared = os.fspath(path), b""
        is_url = "://" in place
        if self._together:  # a bucket is asked once for what is the same for all; a directory may be one of each host
            shared = self._hosts.broadcast_from_leader(
                "headers", lambda: pack_heads(read_heads(place)) if is_url else b"", HUB_WAIT_S
            )
        with self._hosts.run_on_all("open", "loading the checkpoint") as opened:
            heads = unpack_heads(shared) if shared and is_url else None
            hf = read_hf_config(path) if heads is None else _parsed_config(heads.get(CONFIG_NAME), path)
            hf = scorer_config(hf, place) if self._scorer else hf
            family = family_of_hf(hf)
            stored = config_from_hf(hf) if config is None else config
            files = CheckpointFiles(path, heads, tied=stored.tie_word_embeddings)
            parts = (self._hosts.index, self._hosts.count) if self._together else (0, 1)
            opened.share(stored.tie_word_embeddings and has_own_head(files, *parts))
        with self._hosts.run_on_all("check", "loading the checkpoint") as checked:
            if any(opened.shared) if self._together else opened.shared[self._hosts.index]:
                if config is not None:
                    raise ConfigError(
                        f"{place} has {HEAD} with other values than the embedding, and tie_word_embeddings is true. "
                        "Set model.tie_word_embeddings to false."
                    )
                stored = _untied(stored, path)
                files = CheckpointFiles(path, heads)
            config = stored
            model = skeleton(vocab_size_from_hf(hf), config)
            family = family if isinstance(config, family.config) else family_of(config)
            model, tensors = with_score(model, family.tensors) if self._scorer else (model, family.tensors)
            expected = parameters(model, tensors)
            check_tensors(files, expected, tied=config.tie_word_embeddings)
            layouts = [RowLayout.of(parameter, _sharding(parameter, self._mesh, mapping)) for parameter in expected]
            pairs = zip(expected, layouts, strict=True)
            reads = [ParameterRead(files, *pair, self._dtype, self._readers) for pair in pairs]
            total = sum(read.stored_bytes for read in reads)
            if self._together:
                checked.agree({"tensors": digest(repr(stored_shapes(expected)))})
        leaves, structure = jax.tree.flatten(model)
        arrays = self._read_and_place(reads, total)
        assert len(leaves) == len(arrays)
        return jax.tree.unflatten(structure, arrays)

    def _read_and_place(self, reads: Sequence[ParameterRead], total: int) -> list[jax.Array]:
        limit = min(_MAX_BYTES_IN_MEMORY, sum(read.nbytes for read in reads) // _MIN_BATCHES)
        programs: dict[RowLayout, list[Program]] = {}
        arrays: list[jax.Array] = []
        everywhere = 0  # parameters that all hosts have read
        progress = LoadProgress(self._hosts, total, self._on_read)
        # Nobody is late for the others' wait because it waits for its own bytes.
        interval_s = min(_INTERVAL_S, self._hosts.timeout_s / 4)
        with ParallelReader(reads, limit=limit, timeout_s=self._hosts.timeout_s) as reader:
            for number in itertools.count():
                with self._phase(f"read {number}") as phase:
                    if not programs:
                        programs = self._compile(reads, phase)
                    for read in reads[len(arrays) : everywhere]:
                        arrays.append(self._place(read, programs[read.layout]))
                        reader.release(read)
                    complete = reader.wait(len(arrays), interval_s)
                    phase.share((complete, progress.note(reader.bytes_read)))
                everywhere = min(complete for complete, _ in phase.shared)
                progress.show([part for _, part in phase.shared])
                if len(arrays) == len(reads):
                    return arrays
        raise AssertionError("the loop ends by returning")

    def _phase(self, name: str) -> contextlib.AbstractContextManager[Phase]:
        return self._hosts.launch_on_all(name) if self._together else self._hosts.run_on_all(name)

    def _compile(self, reads: Sequence[ParameterRead], phase: Phase) -> dict[RowLayout, list[Program]]:
        """The programs that bring rows to their parameter, by layout: where few hosts read, one that hands them over.

        That one is on a mesh of its own, whose devices may be in another order.
        """
        programs: dict[RowLayout, list[Program]] = {}
        compiled = functools.partial(compile_program, ledger=self._ledger)
        for read in reads:
            if (layout := read.layout) in programs:
                continue
            rows = jax.ShapeDtypeStruct(layout.shape, self._dtype, sharding=layout.sharding)
            programs[layout] = [
                compiled("place_weights", layout.move, [rows], mesh=self._mesh, out_shardings=layout.target)
            ]
            if (readers := self._readers) is not None:
                layers, count, *columns = read.block_shape
                shape = (layers, count * self._mesh.size, *columns)
                block = jax.ShapeDtypeStruct(shape, self._dtype, sharding=readers.sharding)
                spread = compiled(
                    "spread_weights", readers.spread, [block], mesh=readers.mesh, out_shardings=readers.sharding
                )
                programs[layout].insert(0, spread)
        if self._together:
            for number, program in enumerate(itertools.chain(*programs.values())):
                phase.agree({f"program {number}, {name}": value for name, value in program.digests.items()})
        return programs

    def _place(self, read: ParameterRead, programs: Sequence[Program]) -> jax.Array:
        if self._watchdog is None:
            return self._moved(read, read.place(), programs)
        with ready_on_all(self._hosts, "placing rows"):
            rows = read.place()
        with self._watchdog.watch("placing weights"):
            return self._moved(read, rows, programs)

    def _moved(self, read: ParameterRead, rows: jax.Array, programs: Sequence[Program]) -> jax.Array:
        *spread, move = programs
        if spread:
            rows = read.handed_over(jax.block_until_ready(spread[0](rows)))
        return jax.block_until_ready(move(rows))


def _sharding(parameter: Parameter, mesh: Mesh, mapping: ResourceMapping) -> NamedSharding:
    spec = hax.partitioning.pspec_for_axis(parameter.value.axes, mapping)
    for axis, names in zip(parameter.value.axes, spec, strict=True):
        names = axes_of(names)
        parts = math.prod(mesh.shape[name] for name in names)
        if axis.size % parts:
            raise ConfigError(
                f"{parameter.path} has axis {axis.name} of size {axis.size}, which mesh axes {', '.join(names)} would "
                f"split into {parts}; the size must be a multiple. Change mesh_shape so that {' x '.join(names)} "
                f"divides {axis.size}."
            )
    return NamedSharding(mesh, spec)
