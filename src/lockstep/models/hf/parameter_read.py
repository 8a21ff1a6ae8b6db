"""What one host reads of one parameter: requests for ranges of rows, and the memory that they fill."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.names import Parameter
from lockstep.models.hf.row_layout import RowLayout
from lockstep.placement import aligned_empty

CHUNK_BYTES = 8 << 20
"""The most bytes of a request, but for a single row that has more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A range of bytes of a file.

    Args:
        nbytes: The bytes that are read.
        what: The tensor and its file, for errors.
        run: Reads them into the memory of the parameter.
    """

    nbytes: int
    what: str
    run: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a stored tensor, and the index of the device's block that they fill from its beginning."""

    start: int
    stop: int
    block: int
    offset: int = 0

    def cut(self, row: int) -> tuple["_Rows", "_Rows"]:
        """Returns the rows before ``row``, and the others."""
        rest = dataclasses.replace(self, start=row, offset=self.offset + row - self.start)
        return dataclasses.replace(self, stop=row), rest


class ParameterRead:
    """The rows of one parameter that this host reads for its devices.

    Args:
        files: The files of the checkpoint.
        parameter: The parameter.
        layout: The rows that each device reads.
        dtype: The dtype of the parameter; rows are cast as they come.
    """

    def __init__(self, files: CheckpointFiles, parameter: Parameter, layout: RowLayout, dtype: np.dtype[Any]) -> None:
        self.layout = layout
        self._files, self._parameter, self._dtype = files, parameter, dtype
        _, total, *_ = layout.shape
        indices = layout.sharding.addressable_devices_indices_map(layout.shape)
        self._devices = list(indices)
        self._rows = [layout.rows(*index[1].indices(total)[:2]) for index in indices.values() if index is not None]
        self._blocks: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the rows take on this host until they are on its devices."""
        block = math.prod(self.layout.sharding.shard_shape(self.layout.shape))
        return block * self._dtype.itemsize * len(self._devices)

    @property
    def stored_bytes(self) -> int:
        """The bytes that this host reads."""
        rows = sum(stop - start for start, stop in self._rows)
        return sum(self._files.row_bytes(self._parameter.stored.name(layer)) for layer in self._parameter.layers) * rows

    def begin(self) -> Iterator[Request]:
        """Allocates the memory and returns what is to be read into it, in the order of the files."""
        shape = self.layout.sharding.shard_shape(self.layout.shape)
        self._blocks = [aligned_empty(shape, self._dtype) for _ in self._devices]
        for number, layer in enumerate(self._parameter.layers):
            name = self._parameter.stored.name(layer)
            row_bytes = self._files.row_bytes(name)
            for rows in _ranges(self._rows, max(1, CHUNK_BYTES // max(1, row_bytes))):
                yield Request(
                    nbytes=(rows[-1].stop - rows[0].start) * row_bytes,
                    what=f"tensor {name} in {self._files.directory}/{self._files.file_of(name)}",
                    run=functools.partial(self._fill, name, number, rows),
                )

    def place(self) -> jax.Array:
        """Returns the rows as an array of the shape and sharding of the layout, and gives up this host's memory."""
        blocks, self._blocks = self._blocks, []
        shards = [jax.device_put(*each) for each in zip(blocks, self._devices, strict=True)]
        return jax.make_array_from_single_device_arrays(
            self.layout.shape, self.layout.sharding, shards, dtype=self._dtype
        )

    def _fill(self, name: str, layer: int, rows: list[_Rows]) -> None:
        start, first = rows[0].start, self._parameter.first_row
        stored = self._files.read(name, first + start, first + rows[-1].stop)
        for part in rows:
            end = part.offset + part.stop - part.start
            self._blocks[part.block][layer, part.offset : end] = stored[part.start - start : part.stop - start]


def _ranges(devices: list[tuple[int, int]], most: int) -> Iterator[list[_Rows]]:
    """Yields the rows of all devices as ranges of at most ``most`` rows; neighbours share a range."""
    waiting = [_Rows(start, stop, block) for block, (start, stop) in enumerate(devices) if stop > start]
    waiting.sort(key=lambda rows: rows.start, reverse=True)
    current: list[_Rows] = []
    while waiting:
        rows = waiting.pop()
        if current and (rows.start != current[-1].stop or rows.start - current[0].start >= most):
            yield current
            current = []
        room = current[0].start + most if current else rows.start + most
        if rows.stop > room:
            rows, rest = rows.cut(room)
            waiting.append(rest)
        current.append(rows)
    if current:
        yield current
