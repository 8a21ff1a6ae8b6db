"""The writing of arrays: which process writes each part of them, and a checksum of each chunk, which orbax has no
setting for; replicas share what they have in common.
"""

import asyncio
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from lockstep.limits import CHUNK_BYTES
from lockstep.printable import keep_root_logger

with keep_root_logger():  # its import logs by absl, which calls `basicConfig`
    import orbax.checkpoint as ocp

SPLIT_BYTES = 4 << 20
"""Shards of more bytes, of arrays with three axes or more, are stored layer by layer: in an export one is read at a
time."""
LAST_READS_S = 60.0
"""Seconds that the reads of other arrays may take where one cannot be read."""
PIECES = 4  # replicated shards above the mean of what a process writes divided by this are written in pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of an array, whole chunks of one shard, that one process writes."""

    process: int
    shard: tuple[slice, ...]  # the indices of the shard in the array
    axis: int
    first: int  # the first index of the part along `axis` of the shard
    last: int
    nbytes: int

    def of_array(self) -> tuple[slice, ...]:
        """Return its indices in the array."""
        if not self.shard:
            return ()
        start = self.shard[self.axis].start or 0
        part = slice(start + self.first, start + self.last)
        return (*self.shard[: self.axis], part, *self.shard[self.axis + 1 :])

    def of_shard(self, data: np.ndarray) -> np.ndarray:
        """Return its numbers, of those of the shard."""
        return data[(slice(None),) * self.axis + (slice(self.first, self.last),)] if self.shard else data


def share_writing(arrays: Sequence[Any]) -> list[list[Part]]:
    """Share the writing of arrays out between the processes that have them, so that the busiest has little to write.

    Every process comes to the same result. A shard with replicas on several processes is written by one of them; where
    it is large, chunks of it by several, each of which copies the whole shard to its memory.

    Returns:
        The parts of each array, the same objects for the same shapes: of a large job they take a second to find.
    """
    return _shared(tuple(_Struct(tuple(array.shape), np.dtype(array.dtype), array.sharding) for array in arrays))


@dataclasses.dataclass(frozen=True)
class _Struct:
    """The shape of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding


@functools.lru_cache(maxsize=4)
def _shared(arrays: tuple[_Struct, ...]) -> list[list[Part]]:
    shards = [(number, *shard) for number, array in enumerate(arrays) for shard in _shards(array.sharding, array.shape)]
    load = dict.fromkeys(sorted({process for *_, owners in shards for process in owners}), 0)
    sizes = [int(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize) for array in arrays]
    mean = sum(sizes[number] for number, *_ in shards) / max(len(load), 1)
    # What one process alone can write comes first, then the largest: so a greedy choice is a good one.
    shards.sort(key=lambda shard: (len(shard[2]) > 1, -sizes[shard[0]]))
    parts: list[list[Part]] = [[] for _ in arrays]
    for number, index, owners in shards:
        most_parts = min(len(owners), math.ceil(sizes[number] * PIECES / mean) if mean else 1)
        for axis, first, last, share in _pieces(arrays[number], most_parts):
            nbytes = round(sizes[number] * share)
            process = min(owners, key=lambda owner: load[owner])
            load[process] += nbytes
            parts[number].append(Part(process=process, shard=index, axis=axis, first=first, last=last, nbytes=nbytes))
    return parts


def busiest_bytes(arrays: Sequence[Any]) -> int:
    """Return the bytes that the process which writes most writes of arrays, before compression."""
    load: dict[int, int] = {}
    for part in (part for parts in share_writing(arrays) for part in parts):
        load[part.process] = load.get(part.process, 0) + part.nbytes
    return max(load.values(), default=0)


def chunks_of(array: Any) -> tuple[int, ...]:
    """Return the shape of the chunks in which an array is stored."""
    shard = array.sharding.shard_shape(array.shape)
    layers = len(shard) >= 3 and math.prod(shard) * array.dtype.itemsize > SPLIT_BYTES
    return chunk_shape(shard, array.dtype.itemsize, CHUNK_BYTES, (0,) if layers else ())


def chunk_shape(
    shard: tuple[int, ...], itemsize: int, max_bytes: int, single_axes: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return a shape of chunks that divides a shard, so that no two processes write the same chunk.

    Args:
        single_axes: The axes along which a chunk has one entry.
    """
    chunk = [1 if axis in single_axes else size for axis, size in enumerate(shard)]
    for axis, size in enumerate(chunk):
        parts = min(size, -(-math.prod(chunk) * itemsize // max_bytes))
        chunk[axis] = size // next(divisor for divisor in range(parts, size + 1) if size % divisor == 0)
    return tuple(chunk)


def _pieces(array: Any, most: int) -> list[tuple[int, int, int, float]]:
    """Axis, first and last index and share of pieces of a shard: whole chunks, along the axis with most of them."""
    shard = array.sharding.shard_shape(array.shape)
    if not shard:
        return [(0, 0, 1, 1.0)]
    chunk = chunks_of(array)
    axis = max(range(len(shard)), key=lambda dimension: shard[dimension] // chunk[dimension])
    cells = shard[axis] // chunk[axis]
    count = min(most, cells)
    borders = [chunk[axis] * (number * cells // count) for number in range(count + 1)]
    return [(axis, first, last, (last - first) / shard[axis]) for first, last in itertools.pairwise(borders)]


@functools.lru_cache(maxsize=4096)
def _shards(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Each shard of an array, and the processes that have it in the order of their devices."""
    owners_by_shard: dict[tuple[tuple[int | None, int | None], ...], tuple[tuple[slice, ...], dict[int, None]]] = {}
    indices: Mapping[Any, tuple[slice, ...]] = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        key = tuple((part.start, part.stop) for part in index)
        owners_by_shard.setdefault(key, (index, {}))[1][device.process_index] = None
    return [(index, tuple(owners)) for index, owners in owners_by_shard.values()]


OCDBT_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
"""As orbax has it. Shapes and codecs of an array are inline, so in the nodes of the tree, which have checksums too."""


class CheckedArrayHandler(ocp.type_handlers.ArrayHandler):
    """Arrays in zarr 3 with zstd's checksum of each chunk, which tensorstore compares whenever it reads the chunk."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Copy this process's part to its memory; what is returned writes it when it is asked for its result.

        Args:
            values: Global arrays, all that the checkpoint has; `share_writing` says who writes what of them.
            infos: Name and directory of each.
        """
        own_parts = [
            [(part, _shard(array, part)) for part in parts if part.process == jax.process_index()]
            for array, parts in zip(values, share_writing(values), strict=True)
        ]
        for _, shard in (part_and_shard for parts in own_parts for part_and_shard in parts):
            shard.copy_to_host_async()
        writes = []
        for array, info, parts in zip(values, infos, own_parts, strict=True):
            copies = [(part.of_array(), part.of_shard(np.asarray(shard))) for part, shard in parts]
            writes.append((ts.Spec(_spec(info, array, chunks_of(array))), copies))
        return [_Write(writes, infos[0].ts_context)] if writes else []

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Read arrays. Where one cannot be read, the reads of the others end before its error is raised: orbax closes
        the event loop then, and tensorstore prints a traceback for each answer that comes to a closed one.
        """
        before = asyncio.all_tasks()  # which wait for this one
        try:
            return await super().deserialize(infos, args)
        except Exception:
            if reads := asyncio.all_tasks() - before:
                await asyncio.wait(reads, timeout=LAST_READS_S)
            raise


class _Write:
    """The write of a process's part, as orbax expects it: a future."""

    def __init__(self, arrays: Sequence[tuple[Any, list[tuple[Any, np.ndarray]]]], context: Any) -> None:
        self._arrays, self._context = list(arrays), context

    def result(self, timeout: float | None = None) -> None:
        """Write, in the calling thread."""
        arrays, self._arrays = self._arrays, []
        transaction = ts.Transaction(atomic=True)
        for spec, copies in arrays:
            options: dict[str, Any] = {"context": self._context, "transaction": transaction}
            if jax.process_index() == 0:
                ts.open(spec, create=True, open=True, **options).result()
            store = ts.open(spec, open=True, assume_metadata=True, **options).result()
            for index, data in copies:
                # The copy changes no more, so the chunks may refer to it.
                store[index].write(data, can_reference_source_data_indefinitely=True).result()
        transaction.commit_sync()


def _shard(array: jax.Array, part: Part) -> jax.Array:
    """The shard of this process that has a part; a slice of it here would be a device program."""
    return next(shard.data for shard in array.addressable_shards if shard.index == part.shard)


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
