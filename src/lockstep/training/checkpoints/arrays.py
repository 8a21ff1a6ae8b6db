"""The arrays of a checkpoint, written and read with orbax and tensorstore: this and its handler alone import them."""

import asyncio
import contextlib
import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array

from lockstep.errors import ConfigError
from lockstep.limits import CHUNK_BYTES
from lockstep.training.checkpoints.checkpoint import DamagedCheckpointError, read_file

if TYPE_CHECKING:
    from etils import epath

CACHE_BYTES = 1 << 30  # the most bytes of chunks that `ArrayReader` keeps, so that neighbouring parts cost one chunk

TREE = "_METADATA"
"""The file in which orbax says which arrays there are. It alone has no checksum of its own."""

_DAMAGE = {None, "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE"}
"""Statuses of tensorstore for bytes that are wrong or gone; None is INVALID_ARGUMENT, which it leaves out. The rest
(UNAVAILABLE, PERMISSION_DENIED, …) is of the storage: the checkpoint may be good. https://abseil.io/docs/cpp/guides/status-codes"""

_OF_THE_STORE = re.compile(r"(?:([A-Z_]+): )?(?:Error (?:opening|reading|decoding)|Metadata at) ")
"""The beginning of tensorstore's texts; it has no errors of its own, but ValueError."""


def write_arrays(directory: "epath.Path", arrays: Mapping[str, Array]) -> Callable[[], None]:
    """Copy this process's part to its memory, and write it from threads; launches nothing, waits for no other host.

    Replicas share the writing, see `share_writing`. Orbax can do that too (``use_replica_parallel``), but slices arrays
    on the device, by programs that each host would launch alone.

    Returns:
        A function that waits until this process's part is written, and raises what went wrong.
    """
    import orbax.checkpoint as ocp

    async def copy() -> Any:
        return await handler().async_save(directory, args=ocp.args.PyTreeSave(dict(arrays)))

    futures = asyncio.run(copy()) or []

    def wait() -> None:
        for future in futures:
            future.result()

    return wait


def merge_arrays(directory: "epath.Path") -> str:
    """Make one array store of what all processes have written; one process calls it, after all have ended writing.

    Returns:
        What `read_arrays` compares, beside the checksums of the store.
    """
    handler().finalize(directory)
    return hashlib.sha256(read_file(directory / TREE)).hexdigest()


def read_arrays(
    directory: "epath.Path", structs: Mapping[str, jax.ShapeDtypeStruct], tree_digest: str
) -> dict[str, Array]:
    """Read arrays into the shardings of this run, whatever those of the run that wrote them; launches nothing.

    Each process reads only what its own devices hold.

    Args:
        tree_digest: What `merge_arrays` returned.
    """
    import orbax.checkpoint as ocp

    restore_args = {
        name: ocp.type_handlers.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=struct.sharding, dtype=struct.dtype, global_shape=struct.shape
        )
        for name, struct in structs.items()
    }
    args = ocp.args.PyTreeRestore(item=dict.fromkeys(structs, 0), restore_args=restore_args, partial_restore=True)
    store = _Store(directory)
    with damage_named(directory):
        for opening in [store.open(name) for name in structs]:
            _check_chunks(opening.result(), directory)
        if tree_digest != hashlib.sha256(read_file(directory / TREE)).hexdigest():
            raise DamagedCheckpointError(f"{directory / TREE} is damaged: its SHA-256 is not that of its writing")
        read: dict[str, Array] = handler().restore(directory, args=args)
    return read


class _Store:
    """The store of a checkpoint's arrays."""

    def __init__(self, directory: "epath.Path") -> None:
        import tensorstore

        self._directory = directory
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})

    def open(self, name: str) -> Any:
        """Begin to open an array; what is returned has it as its ``result()``."""
        import tensorstore

        # https://google.github.io/tensorstore/kvstore/ocdbt: where orbax puts its zarr arrays.
        store = {"driver": "ocdbt", "base": f"{_url(self._directory)}/", "path": f"{name}/"}
        spec = {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}
        return tensorstore.open(spec, read=True, context=self._context)


def _check_chunks(array: Any, directory: "epath.Path") -> None:
    """Refuse an array whose chunks would take memory that it does not have itself: a chunk is decoded as a whole."""
    chunk, name = tuple(array.chunk_layout.read_chunk.shape or ()), array.kvstore.path.rstrip("/")
    itemsize = array.dtype.numpy_dtype.itemsize
    if (size := math.prod(chunk) * itemsize) > max(CHUNK_BYTES, math.prod(array.shape) * itemsize):
        raise DamagedCheckpointError(
            f"array {name} of {directory} has shape {tuple(array.shape)} and chunks of {chunk}, {size:,} bytes each, "
            "which is more than the whole array. Do not trust it"
        )


class ArrayReader:
    """Reads parts of the arrays of a checkpoint to this host's memory, without any device. Threads may share it."""

    def __init__(self, directory: "epath.Path") -> None:
        self._directory, self._store = directory, _Store(directory)
        self._open: dict[str, Any] = {}

    def read(self, name: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """Return a part of an array.

        Raises:
            DamagedCheckpointError: A file is not as it was written, or not there.
            ConfigError: It cannot be read.
        """
        try:
            with damage_named(self._directory):
                if name not in self._open:
                    array = self._store.open(name).result()
                    _check_chunks(array, self._directory)
                    self._open[name] = array
                return np.asarray(self._open[name][index].read().result())
        except DamagedCheckpointError:
            raise
        except ValueError as error:  # tensorstore has no errors of its own
            raise ConfigError(f"array {name} of {self._directory} cannot be read: {_beginning(error)}") from error


def _url(directory: "epath.Path") -> str:
    path = os.fspath(directory)
    return path if "://" in path else f"file://{path}"


@contextlib.contextmanager
def damage_named(directory: "epath.Path") -> Iterator[None]:
    """Raise what the block found wrong with the bytes of a checkpoint as damage, with the file.

    Raises:
        DamagedCheckpointError: A file is not as it was written, or not there.
    """
    try:
        yield
    except DamagedCheckpointError:
        raise
    except Exception as error:  # orbax puts tensorstore's into one of its own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = str(cause)
        status = _OF_THE_STORE.match(text) if isinstance(cause, ValueError) else None
        if not isinstance(cause, FileNotFoundError) and not (status and status[1] in _DAMAGE):
            raise
        chunk = re.search(r'Error reading "([^"]+)" in OCDBT', text)
        where = _file_of(directory, chunk[1]) if chunk else None
        raise DamagedCheckpointError(f"{where or directory} is damaged: {_beginning(cause)}") from error


def _beginning(error: BaseException) -> str:
    """The beginning of an error's text: tensorstore adds pages to it."""
    return re.split(r" \[(?:source locations|tensorstore_spec)=", str(error))[0][:800]


def _file_of(directory: "epath.Path", key: str) -> str | None:
    """The file that has a chunk; None where the tree does not say."""
    import tensorstore

    try:
        store = tensorstore.KvStore.open(f"{_url(directory)}/").result()
        nodes = [tensorstore.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]]
        while nodes:
            for entry in tensorstore.ocdbt.dump(store, nodes.pop()).result()["entries"]:
                if "location" in entry:
                    nodes.append(entry["location"])
                elif entry["key"] == key.encode() and "indirect_value" in entry:
                    base, file = entry["indirect_value"].split(":")[1:3]
                    return os.fspath(directory / base / file)
    except (ValueError, LookupError):  # the tree itself is damaged, which the error says then
        pass
    return None


@functools.cache
def handler() -> Any:
    """The handler of orbax, made once: to import it takes a second."""
    import orbax.checkpoint as ocp

    from lockstep.training.checkpoints.writers import CheckedArrayHandler

    # This layer of orbax has no barriers between processes: those above it are device programs, or end a process that
    # waits for one which failed. See docs/adr/0015-checkpoints.md.
    arrays = CheckedArrayHandler(
        use_replica_parallel=False, enable_write_sharding_file=False, array_metadata_store=None
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_zarr3=True)
