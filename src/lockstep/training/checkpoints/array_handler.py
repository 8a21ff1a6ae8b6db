"""The writing of arrays with a checksum of each chunk, which orbax has no setting for."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

OCDBT_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
"""As orbax has it. Shapes and codecs of an array are inline, so in the nodes of the tree, which have checksums too."""


class CheckedArrayHandler(ocp.type_handlers.ArrayHandler):
    """Arrays in zarr 3 with zstd's checksum of each chunk, which tensorstore compares whenever it reads the chunk."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Copy this process's shards to its memory; what is returned writes them when it is asked for its result.

        Args:
            values: Global arrays; each shard is written by the process that has its first replica.
            infos: Name and directory of each.
            args: The size of chunks, and the axes that are stored entry by entry.
        """
        for array in values:
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
        writes = []
        for array, info, arg in zip(values, infos, args, strict=True):
            shards = [(s.index, np.asarray(s.data)) for s in array.addressable_shards if s.replica_id == 0]
            shard_shape = array.sharding.shard_shape(array.shape)
            chunk = chunk_shape(shard_shape, array.dtype.itemsize, arg.chunk_byte_size, arg.shard_axes)
            spec = _spec(info, array, chunk)
            writes.append((ts.Spec(spec), shards))
        return [_Write(writes, infos[0].ts_context)] if writes else []


class _Write:
    """The write of a process's shards, as orbax expects it: a future.

    Args:
        arrays: Specification and shards of each array.
    """

    def __init__(self, arrays: Sequence[tuple[Any, list[tuple[Any, np.ndarray]]]], context: Any) -> None:
        self._arrays, self._context = list(arrays), context

    def result(self, timeout: float | None = None) -> None:
        """Write, in the calling thread.

        Args:
            timeout: Not used: who waits gives the save up, see `Checkpointer`.
        """
        arrays, self._arrays = self._arrays, []
        transaction = ts.Transaction(atomic=True)
        for spec, shards in arrays:
            options: dict[str, Any] = {"context": self._context, "transaction": transaction}
            if jax.process_index() == 0:
                ts.open(spec, create=True, open=True, **options).result()
            store = ts.open(spec, open=True, assume_metadata=True, **options).result()
            for index, data in shards:
                # The copy changes no more, so the chunks may refer to it.
                store[index].write(data, can_reference_source_data_indefinitely=True).result()
        transaction.commit_sync()


def chunk_shape(
    shard: tuple[int, ...], itemsize: int, max_bytes: int, single_axes: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return a shape of chunks that divides a shard, so that no two processes write the same chunk.

    Args:
        shard: The shape of the shards.
        itemsize: The bytes of a number.
        single_axes: The axes along which a chunk has one entry.
    """
    chunk = [1 if axis in single_axes else size for axis, size in enumerate(shard)]
    for axis, size in enumerate(chunk):
        parts = min(size, -(-math.prod(chunk) * itemsize // max_bytes))
        chunk[axis] = size // next(each for each in range(parts, size + 1) if size % each == 0)
    return tuple(chunk)


def _spec(info: Any, array: jax.Array, chunk: tuple[int, ...]) -> dict[str, Any]:
    """The specification of an array in tensorstore, https://google.github.io/tensorstore/driver/zarr3."""
    directory = os.fspath(info.parent_dir)
    base = directory if "://" in directory else f"file://{directory}"
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": f"{base}/ocdbt.process_{jax.process_index()}/",  # where orbax looks when it merges
            "path": f"{info.name}/",
            "config": OCDBT_CONFIG,
            "assume_config": True,
        },
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "store_data_equal_to_fill_value": True,  # so a chunk that is not there is damage, and no zeros
        "dtype": array.dtype.name,
        "metadata": {
            "shape": array.shape,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
            ],
        },
    }
