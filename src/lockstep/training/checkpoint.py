"""Training checkpoints on a disk or in a bucket, written and read with orbax: the only file that imports it."""

import asyncio
import dataclasses
import functools
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from etils import epath

log = logging.getLogger(__name__)

METADATA = "metadata.json"
"""The file that makes a directory a checkpoint; it is written last."""

FORMAT = 1
"""The version of the layout of a checkpoint."""

CHUNK_BYTES = 64 << 20
"""The most bytes of a chunk in which an array is stored, before compression: what reading any part of it costs."""
SPLIT_BYTES = 4 << 20
"""Shards of more bytes, of arrays with three axes or more, are stored layer by layer: in an export one is read at a
time."""
CACHE_BYTES = 1 << 30
"""The most bytes of chunks that `ArrayReader` keeps, so that neighbouring parts cost one chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """What a checkpoint says of itself, beside its arrays."""

    step: int
    """The number of completed steps."""
    loss: float
    """The loss of the last of them."""
    arrays: str
    """The name of the directory, inside that of the checkpoint, which has the arrays."""
    shapes: Mapping[str, str]
    """The type and the global shape of each array by its name, such as ``float32[8,16]``."""
    facts: Mapping[str, str]
    """What a run must have in common with this one to go on from here, by name."""
    config: Mapping[str, Any]
    """The configuration of the run."""
    hooks: Mapping[str, Any]
    """The states of the hooks by their names."""
    hooks_called: bool
    """Whether the hooks had been called for this step."""
    model: Mapping[str, Any] | None = None
    """What `model_spec` returned; None where the run did not say."""

    def to_json(self) -> str:
        """Return the metadata as JSON text."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CheckpointMetadata":
        """Return the metadata of a JSON text.

        Args:
            text: The content of a ``metadata.json``.

        Raises:
            ConfigError: The text is of another version.
        """
        values = json.loads(text)
        if values.pop("format", None) != FORMAT:
            raise ConfigError(
                f"this version of lockstep reads checkpoints of format {FORMAT} only. Go on with the version that "
                "wrote them, or start a new trainer.run_id."
            )
        return cls(**values)


class CheckpointDirectory:
    """The checkpoints of a run: ``step-N/metadata.json`` beside a directory of arrays.

    A checkpoint exists once its metadata does, which is one small file that appears as a whole on a disk as in a
    bucket, so nothing has to be renamed. Each attempt to save has a directory of arrays of its own: what a process
    that was thought dead still writes is in nobody's way.

    Args:
        path: A local directory, or a URL that tensorstore and fsspec know, such as ``gs://bucket/checkpoints``.
    """

    def __init__(self, path: str) -> None:
        from etils import epath

        self._local = "://" not in path
        # tensorstore wants absolute paths.
        self.path: epath.Path = epath.Path(os.path.abspath(path) if self._local else path)
        _handler()  # imports orbax now: that takes a second, in which the first save would hold training up

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        return sorted(step for step, directory in self._found() if (directory / METADATA).exists())

    def metadata(self, step: int) -> CheckpointMetadata:
        """Read the metadata of a checkpoint.

        Args:
            step: The number of completed steps.

        Raises:
            ConfigError: The checkpoint is of another version.
            OSError: It cannot be read.
        """
        return CheckpointMetadata.from_json((self.of(step) / METADATA).read_text())

    def of(self, step: int) -> "epath.Path":
        """Return the directory of a checkpoint.

        Args:
            step: The number of completed steps.
        """
        return self.path / f"step-{step}"

    def begin(self, step: int) -> str:
        """Make a directory for the arrays of a checkpoint; nothing counts before `commit`.

        Args:
            step: The number of completed steps.

        Returns:
            The name of the directory of arrays.

        Raises:
            OSError: It cannot be made.
        """
        name = f"arrays-{secrets.token_hex(4)}"
        (self.of(step) / name).mkdir(parents=True, exist_ok=True)
        return name

    def commit(self, metadata: CheckpointMetadata) -> None:
        """Make a checkpoint of what has been written.

        Args:
            metadata: The metadata of the checkpoint.

        Raises:
            OSError: The file cannot be written.
        """
        self.write_whole(self.of(metadata.step) / METADATA, metadata.to_json().encode())

    def write_whole(self, target: "epath.Path", data: bytes) -> None:
        """Write a file that appears as a whole.

        Args:
            target: The file, in an existing directory.
            data: Its content.

        Raises:
            OSError: It cannot be written.
        """
        if not self._local:
            target.write_bytes(data)  # an object appears as a whole
            return
        draft = f"{os.fspath(target)}.tmp"
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)

    def remove(self, step: int) -> None:
        """Remove a checkpoint or what is there of it, its metadata first, so that no half of it ever counts.

        Args:
            step: The number of completed steps.

        Raises:
            OSError: It cannot be removed.
        """
        (self.of(step) / METADATA).unlink(missing_ok=True)
        self.of(step).rmtree(missing_ok=True)

    def unfinished(self) -> list[int]:
        """Return the steps of directories without metadata, which interrupted saves have left."""
        complete = set(self.steps())
        return sorted(step for step, _ in self._found() if step not in complete)

    def _found(self) -> list[tuple[int, "epath.Path"]]:
        if not self.path.exists():
            return []
        matches = [(re.fullmatch(r"step-(\d+)", each.name), each) for each in self.path.iterdir()]
        return [(int(match[1]), each) for match, each in matches if match is not None]


def named_arrays(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths.

    Args:
        tree: Arrays, or what stands for them.

    Returns:
        The leaves by name, such as ``model.embed.0``.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves have the same name"
    return named


def shape_texts(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return type and shape of each array as a text.

    Args:
        arrays: Arrays or shape structs by name.
    """
    return {name: f"{each.dtype}[{','.join(map(str, each.shape))}]" for name, each in arrays.items()}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return what differs between two nested mappings.

    Args:
        before: The old values.
        now: The new values.
        prefix: The keys that lead to them, with a dot at their end.

    Returns:
        One line per value, ``key: old → new``.
    """
    lines = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key, "missing"), now.get(key, "missing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changes(old, new, f"{prefix}{key}.")
        elif json.dumps(old) != json.dumps(new):
            lines.append(f"{prefix}{key}: {old} → {new}")
    return lines


def write_arrays(directory: "epath.Path", arrays: Mapping[str, Array]) -> Callable[[], None]:
    """Copy this process's shards to its memory, and write them from threads; launches nothing, waits for no other host.

    Each shard is written by the process that has its first replica. Slices of replicated arrays, which orbax can
    share out between the replicas, would be device programs, so it does not.

    Args:
        directory: An empty directory that every process sees.
        arrays: Global arrays by name. They may be donated as soon as this returns.

    Returns:
        A function that waits until this process's part is written, and raises what went wrong.
    """
    import orbax.checkpoint as ocp

    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=_layers(a)) for name, a in arrays.items()}

    async def copy() -> Any:
        return await _handler().async_save(directory, args=ocp.args.PyTreeSave(dict(arrays), save_args=save_args))

    futures = asyncio.run(copy()) or []

    def wait() -> None:
        for future in futures:
            future.result()

    return wait


def merge_arrays(directory: "epath.Path") -> None:
    """Make one array store of what all processes have written; one process calls it, after all have ended writing.

    Args:
        directory: The directory that the processes wrote to.
    """
    _handler().finalize(directory)


def read_arrays(directory: "epath.Path", structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """Read arrays into the shardings of this run, whatever those of the run that wrote them; launches nothing.

    Each process reads only what its own devices hold.

    Args:
        directory: The directory of the arrays.
        structs: Global shape, type and sharding of the arrays to read, by name.

    Returns:
        The arrays by name.
    """
    import orbax.checkpoint as ocp

    restore_args = {
        name: ocp.type_handlers.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=one.sharding, dtype=one.dtype, global_shape=one.shape
        )
        for name, one in structs.items()
    }
    args = ocp.args.PyTreeRestore(item=dict.fromkeys(structs, 0), restore_args=restore_args, partial_restore=True)
    read: dict[str, Array] = _handler().restore(directory, args=args)
    return read


class ArrayReader:
    """Reads parts of the arrays of a checkpoint to this host's memory, without any device. Threads may share it.

    Args:
        directory: The directory of the arrays.
    """

    def __init__(self, directory: "epath.Path") -> None:
        import tensorstore

        url = os.fspath(directory)
        self._base = url if "://" in url else f"file://{url}"
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._open: dict[str, Any] = {}

    def read(self, name: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """Return a part of an array.

        Args:
            name: The name of the array.
            index: The part along each of its axes.

        Raises:
            ConfigError: It cannot be read.
        """
        import tensorstore

        try:
            if name not in self._open:
                # https://google.github.io/tensorstore/kvstore/ocdbt: where orbax puts its zarr arrays.
                store = {"driver": "ocdbt", "base": f"{self._base}/", "path": f"{name}/"}
                spec = {"driver": "zarr", "kvstore": store}
                self._open[name] = tensorstore.open(spec, read=True, context=self._context).result()
            return np.asarray(self._open[name][index].read().result())
        except ValueError as error:  # tensorstore has no errors of its own
            text = f"array {name} of {self._base} cannot be read: {str(error)[:400]}. Copy the checkpoint again."
            raise ConfigError(text) from error


def _layers(array: Array) -> tuple[int, ...]:
    """The axes that are stored in parts of one entry each."""
    shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return (0,) if array.ndim >= 3 and shard > SPLIT_BYTES else ()


@functools.cache
def _handler() -> Any:
    import orbax.checkpoint as ocp

    # This layer of orbax has no barriers between processes: those above it are device programs, or end a process that
    # waits for one which failed. See docs/adr/0015-checkpoints.md.
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=False, enable_write_sharding_file=False, array_metadata_store=None
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
