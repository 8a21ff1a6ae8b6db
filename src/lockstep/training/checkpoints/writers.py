"""The process that writes each part of the arrays of a checkpoint; replicas share what they have in common."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

CHUNK_BYTES = 64 << 20
"""The most bytes of a chunk in which an array is stored, before compression: what reading any part of it costs."""
SPLIT_BYTES = 4 << 20
"""Shards of more bytes, of arrays with three axes or more, are stored layer by layer: in an export one is read at a
time."""
PIECES = 4
"""Replicated shards above the mean of what a process writes divided by this are written in pieces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of an array, whole chunks of one shard, that one process writes.

    Args:
        shard: The indices of the shard in the array.
        first: The first index of the part along ``axis`` of the shard.
        last: The index after its last.
        nbytes: Its bytes before compression.
    """

    process: int
    shard: tuple[slice, ...]
    axis: int
    first: int
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

    Args:
        arrays: Global arrays, or their shapes with shardings.

    Returns:
        The parts of each array.
    """
    shards = [(number, *each) for number, array in enumerate(arrays) for each in _shards(array.sharding, array.shape)]
    load = dict.fromkeys(sorted({process for *_, owners in shards for process in owners}), 0)
    sizes = [int(math.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize) for each in arrays]
    mean = sum(sizes[number] for number, *_ in shards) / max(len(load), 1)
    # What one process alone can write comes first, then the largest: so a greedy choice is a good one.
    shards.sort(key=lambda each: (len(each[2]) > 1, -sizes[each[0]]))
    parts: list[list[Part]] = [[] for _ in arrays]
    for number, index, owners in shards:
        wanted = min(len(owners), math.ceil(sizes[number] * PIECES / mean) if mean else 1)
        for axis, first, last, share in _pieces(arrays[number], wanted):
            nbytes = round(sizes[number] * share)
            process = min(owners, key=lambda each: load[each])
            load[process] += nbytes
            parts[number].append(Part(process=process, shard=index, axis=axis, first=first, last=last, nbytes=nbytes))
    return parts


def busiest_bytes(arrays: Sequence[Any]) -> int:
    """Return the bytes that the process which writes most writes of arrays, before compression.

    Args:
        arrays: Global arrays, or their shapes with shardings.
    """
    load: dict[int, int] = {}
    for part in (part for parts in share_writing(arrays) for part in parts):
        load[part.process] = load.get(part.process, 0) + part.nbytes
    return max(load.values(), default=0)


def chunks_of(array: Any) -> tuple[int, ...]:
    """Return the shape of the chunks in which an array is stored.

    Args:
        array: A global array, or its shape with a sharding.
    """
    shard = array.sharding.shard_shape(array.shape)
    layers = len(shard) >= 3 and math.prod(shard) * array.dtype.itemsize > SPLIT_BYTES
    return chunk_shape(shard, array.dtype.itemsize, CHUNK_BYTES, (0,) if layers else ())


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


def _pieces(array: Any, wanted: int) -> list[tuple[int, int, int, float]]:
    """Axis, first and last index and share of pieces of a shard: whole chunks, along the axis with most of them."""
    shard = array.sharding.shard_shape(array.shape)
    if not shard:
        return [(0, 0, 1, 1.0)]
    chunk = chunks_of(array)
    axis = max(range(len(shard)), key=lambda each: shard[each] // chunk[each])
    cells = shard[axis] // chunk[axis]
    count = min(wanted, cells)
    borders = [chunk[axis] * (number * cells // count) for number in range(count + 1)]
    return [(axis, first, last, (last - first) / shard[axis]) for first, last in itertools.pairwise(borders)]


@functools.lru_cache(maxsize=4096)
def _shards(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Each shard of an array, and the processes that have it in the order of their devices."""
    found: dict[tuple[tuple[int | None, int | None], ...], tuple[tuple[slice, ...], dict[int, None]]] = {}
    indices: Mapping[Any, tuple[slice, ...]] = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        key = tuple((each.start, each.stop) for each in index)
        found.setdefault(key, (index, {}))[1][device.process_index] = None
    return [(index, tuple(owners)) for index, owners in found.values()]
