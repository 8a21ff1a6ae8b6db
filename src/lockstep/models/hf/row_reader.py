"""Reads the rows of parameters that a host needs: many ranges of files, in a few threads, in bounded memory."""

import collections
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

import jax
import numpy as np

from lockstep.errors import HostTimeoutError
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.names import Parameter
from lockstep.models.hf.row_layout import ReadingHosts, RowLayout
from lockstep.placement import aligned_empty

CHUNK_BYTES = 8 << 20
"""The most bytes of a request, but for a single row that has more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A range of bytes of a file.

    Args:
        what: The tensor and its file, for errors.
        run: Reads them into the memory of the parameter.
    """

    nbytes: int
    what: str
    run: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a stored tensor, and the number of the rows' device that they fill from its beginning."""

    start: int
    stop: int
    block: int
    offset: int = 0

    def cut(self, row: int) -> tuple["_Rows", "_Rows"]:
        """Return the rows before ``row``, and the others."""
        rest = dataclasses.replace(self, start=row, offset=self.offset + row - self.start)
        return dataclasses.replace(self, stop=row), rest


class ParameterRead:
    """The rows of one parameter that this host reads, for its own devices or for those of its group of hosts.

    Args:
        layout: The rows that each device needs.
        dtype: The dtype of the parameter; rows are cast as they come.
        readers: The groups of hosts of which one reads; None where each host reads for itself.
        process: The number of this host; None for ``jax.process_index()``.
    """

    def __init__(
        self, files: CheckpointFiles, parameter: Parameter, layout: RowLayout, dtype: np.dtype[Any],
        readers: ReadingHosts | None = None, process: int | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.readers = layout, readers
        self._files, self._parameter, self._dtype = files, parameter, dtype
        process = jax.process_index() if process is None else process
        self._devices = [device for device in layout.mesh.devices.flat if device.process_index == process]
        indices = layout.sharding.devices_indices_map(layout.shape)
        served = [[device] if readers is None else readers.served(device) for device in self._devices]
        _, total, *_ = layout.shape
        self._rows = [layout.rows(*indices[device][1].indices(total)[:2]) for device in itertools.chain(*served)]
        self._blocks: list[np.ndarray] = []

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of what each device of this host has at first: the rows of all devices that it reads for."""
        layers, rows, *columns = self.layout.sharding.shard_shape(self.layout.shape)
        return (layers, rows * (1 if self.readers is None else self.readers.hosts), *columns)

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the rows take on this host until they are on its devices."""
        return math.prod(self.block_shape) * self._dtype.itemsize * len(self._devices)

    @property
    def stored_bytes(self) -> int:
        """The bytes that this host reads."""
        rows = sum(stop - start for start, stop in self._rows)
        return sum(self._files.row_bytes(self._parameter.names(layer)[0]) for layer in self._parameter.layers) * rows

    def begin(self) -> Iterator[Request]:
        """Allocate the memory and return what is to be read into it, in the order of the files."""
        self._blocks = [aligned_empty(self.block_shape, self._dtype) for _ in self._devices]
        return self.requests()

    def requests(self) -> Iterator[Request]:
        """Return what is to be read, in the order of the files."""
        for number, layer in enumerate(self._parameter.layers):
            names = self._parameter.names(layer)
            row_bytes = self._files.row_bytes(names[0])
            for rows in _ranges(self._rows, max(1, CHUNK_BYTES // max(1, row_bytes))):
                yield Request(
                    nbytes=(rows[-1].stop - rows[0].start) * row_bytes,
                    what=f"tensor {names[0]} in {self._files.directory}/{self._files.file_of(names[0])}",
                    run=functools.partial(self._fill, names, number, rows),
                )

    def place(self) -> jax.Array:
        """Return the rows where they were read, and give up this host's memory.

        The array has the shape and sharding of the layout; with ``readers`` that of ``readers.sharding``, from which
        `ReadingHosts.spread` and `spread` make it.
        """
        blocks, self._blocks = self._blocks, []
        shards = [jax.device_put(*block_and_device) for block_and_device in zip(blocks, self._devices, strict=True)]
        return self._array(shards, self.layout.sharding if self.readers is None else self.readers.sharding)

    def handed_over(self, spread: jax.Array) -> jax.Array:
        """Return what `ReadingHosts.spread` made of the rows as an array of the shape and sharding of the layout."""
        shards = {shard.device: shard.data for shard in spread.addressable_shards}
        return self._array([shards[device] for device in self._devices], self.layout.sharding)

    def _array(self, shards: Sequence[jax.Array], sharding: jax.sharding.Sharding) -> jax.Array:
        layers, rows, *columns = shards[0].shape
        shape = (layers, rows * self.layout.mesh.size, *columns)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=self._dtype)

    def _fill(self, names: Sequence[str], layer: int, rows: list[_Rows]) -> None:
        start, first = rows[0].start, self._parameter.first_row
        stored = self._files.read_rows(names, first + start, first + rows[-1].stop)
        hosts = 1 if self.readers is None else self.readers.hosts
        for part in rows:
            device, host = divmod(part.block, hosts)
            begin = host * (self.block_shape[1] // hosts) + part.offset
            end = begin + part.stop - part.start
            self._blocks[device][layer, begin:end] = stored[part.start - start : part.stop - start]


def _ranges(devices: list[tuple[int, int]], most: int) -> Iterator[list[_Rows]]:
    """Yield the rows of all devices as ranges of at most ``most`` rows; neighbours share a range."""
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


THREADS = 8


class Job(Protocol):
    """Ranges whose memory is needed together, such as a `ParameterRead`."""

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes from its begin until `ParallelReader.release`."""

    def begin(self) -> Iterator[Request]:
        """Allocate the memory and return what is to be read."""


class ParallelReader:
    """A context manager that reads jobs in their order, several requests at a time.

    A job begins when it and those that are not released yet have at most ``limit`` bytes; a larger one is alone. The
    threads end with the context, or with the request that they are in; they do not keep the interpreter alive.

    Args:
        timeout_s: The seconds in which at least one of the requests under way must end.
    """

    def __init__(self, jobs: Sequence[Job], *, limit: int, timeout_s: float) -> None:
        self._jobs, self._limit, self._timeout_s = jobs, limit, timeout_s
        self.bytes_read = 0
        """The bytes read so far."""
        self._changed = threading.Condition()
        self._requests: collections.deque[tuple[int, Request]] = collections.deque()
        self._left: list[int] = []  # requests that have not ended, of each job that has begun
        self._in_memory = 0
        self._under_way: list[Request] = []
        self._last_end = time.monotonic()
        self._error: BaseException | None = None
        self._closed = False

    def __enter__(self) -> Self:
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"lockstep-load-{number}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, beyond: int, timeout_s: float) -> int:
        """Wait until more than ``beyond`` jobs are complete, counted from the first, or all, or for some seconds.

        Args:
            beyond: The number of jobs that are known to be complete.

        Returns:
            The number of jobs that are complete, counted from the first.

        Raises:
            HostTimeoutError: No request has ended for the reader's ``timeout_s``; names what is being read.
            Exception: What a request raised.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                self._raise_if_stalled()
                complete = next((job for job, left in enumerate(self._left) if left), len(self._left))
                rest = deadline - time.monotonic()
                if complete > beyond or complete == len(self._jobs) or rest <= 0:
                    return complete
                self._changed.wait(min(rest, self._timeout_s / 4))

    def release(self, job: Job) -> None:
        """Count the memory of a job as free."""
        with self._changed:
            self._in_memory -= job.nbytes
            self._changed.notify_all()

    def _raise_if_stalled(self) -> None:
        if self._under_way and time.monotonic() - self._last_end > self._timeout_s:
            names = ", ".join(dict.fromkeys(request.what for request in self._under_way))
            raise HostTimeoutError(
                f"nothing of {names} came for {self._timeout_s:g} s. Check the disk, or the network and the access to "
                "the bucket, or raise timeout_s."
            )

    def _run(self) -> None:
        try:
            while (taken := self._take()) is not None:
                job, request = taken
                request.run()
                with self._changed:
                    self.bytes_read += request.nbytes
                    self._left[job] -= 1
                    self._under_way.remove(request)
                    self._last_end = time.monotonic()
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> tuple[int, Request] | None:
        """Return the next request and the number of its job; None when there is none, or never will be."""
        with self._changed:
            while not self._closed and self._error is None:
                while not self._requests and self._begins_next():
                    pass
                if self._requests:
                    if not self._under_way:
                        self._last_end = time.monotonic()
                    job, request = self._requests.popleft()
                    self._under_way.append(request)
                    return job, request
                if len(self._left) == len(self._jobs):
                    return None
                self._changed.wait()
            return None

    def _begins_next(self) -> bool:
        """Begin the next job, if there is one and it fits; return whether it did."""
        number = len(self._left)
        if number == len(self._jobs):
            return False
        job = self._jobs[number]
        if self._in_memory and self._in_memory + job.nbytes > self._limit:
            return False
        self._in_memory += job.nbytes
        requests = list(job.begin())
        self._requests.extend((number, request) for request in requests)
        self._left.append(len(requests))
        self._changed.notify_all()
        return True
