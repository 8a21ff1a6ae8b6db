"""A finished cache of tokenised rows: what is in it, and rows of it as arrays."""

import bisect
import contextlib
import dataclasses
import functools
import glob
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import fsspec
import numpy as np
from jaxtyping import Int

from lockstep.files import new_file
from lockstep.json_text import parse_json, refused, typed
from lockstep.limits import check_regular, read_object
from lockstep.storage import WAIT_S, call_storage
from lockstep.training.data.examples import TokenSequence
from lockstep.training.data.packing import Layout, Row
from lockstep.training.data.row_records import INDEX, ROW, check_record, parse_record, parse_values
from lockstep.training.objectives import DESIRABLE, REFERENCE

DEAD_S = 3600.0
OPEN_CHUNKS = 128  # chunks whose files are mapped into memory at a time; each takes two file descriptors


@contextlib.contextmanager
def cache_file(fs: Any, path: str) -> Iterator[BinaryIO]:
    """Write a file that appears as a whole, or in a bucket when it is closed."""
    if not is_local(fs):
        with fs.open(path, "wb") as stream:
            yield stream
        return
    # Another job may read or write the same cache: what it has mapped must not change.
    with new_file(path) as stream:
        yield stream


def remove_dead_files(directory: str) -> None:
    """Remove what processes that were killed were writing; one that lives has written to its file since."""
    for path in glob.glob(f"{glob.escape(directory)}/*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.path.getmtime(path) > DEAD_S:
                os.remove(path)


def is_local(fs: Any) -> bool:
    """Whether files of a file system can be mapped into memory."""
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


RESIDENT_BYTES = 1 << 30  # the most bytes of rows in a bucket that a host keeps in memory, so that each is read once
GAP_BYTES = 1 << 16  # neighbouring rows of a larger cache are read in one request where less than this is between them


class RowReader:
    """Reads rows of chunks by their numbers.

    Those on a disk are mapped into memory. In a bucket the index of a chunk is read once, and its rows too where
    ``resident``; else runs of neighbouring rows.

    Args:
        name: A function from the number of a chunk and a suffix to the path of its file.
        resident: Whether the rows of a bucket stay in memory.
        wait_s: The seconds that a bucket may take for one call.
    """

    def __init__(
        self,
        fs: Any,
        name: Callable[[int, str], str],
        counts: Sequence[int],
        *,
        resident: bool = True,
        wait_s: float = WAIT_S,
    ) -> None:
        self._fs, self._name, self._resident, self._wait_s = fs, name, resident, wait_s
        self._ends = np.cumsum(np.asarray(counts, np.int64))
        self._mapped = functools.lru_cache(maxsize=OPEN_CHUNKS)(self._map)
        self._index: dict[int, np.ndarray] = {}
        self._rows: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Return the number of rows of all chunks."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: Sequence[int]) -> list[Int[np.ndarray, " record"]]:
        """Read the records of some rows, see `parse_record`.

        Raises:
            HostTimeoutError: A bucket does not answer.
        """
        chunks = np.searchsorted(self._ends, np.asarray(numbers), side="right")
        starts = np.concatenate([[0], self._ends])[chunks]
        places = [(int(c), int(number - start)) for c, number, start in zip(chunks, numbers, starts, strict=True)]
        return self._read_mapped(places) if is_local(self._fs) else self._read_bucket(places)

    def _read_mapped(self, places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        arrays = []
        for chunk, place in places:
            index, rows = self._mapped(chunk)
            start, end = _bounds(index, place)
            if end > len(rows):
                raise ValueError(f"row {place} of chunk {chunk} ends at {end} of {len(rows)} numbers")
            arrays.append(rows[start:end])
        return arrays

    def _map(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        for suffix in ("index", "rows"):
            check_regular(self._name(chunk, suffix), sys.maxsize)  # a pipe would be waited for
        # As plain arrays: each slice of a np.memmap runs Python of its class.
        index = np.memmap(self._name(chunk, "index"), INDEX, "r")
        rows = np.memmap(self._name(chunk, "rows"), ROW, "r")
        return np.asarray(index), np.asarray(rows)

    def _read_bucket(self, places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        chunks = sorted({chunk for chunk, _ in places})
        self._keep(self._index, "index", INDEX, chunks)
        ends = self._index
        bounds = [(chunk, *_bounds(ends[chunk], place)) for chunk, place in places]
        if self._resident:
            self._keep(self._rows, "rows", ROW, chunks)
            return [self._rows[chunk][start:end] for chunk, start, end in bounds]
        runs = neighbouring(bounds, GAP_BYTES // ROW.itemsize)
        data = self._ranges("rows", [(c, start * ROW.itemsize, end * ROW.itemsize) for c, start, end in runs])
        arrays = [np.frombuffer(part, ROW) for part in data]
        records = []
        for chunk, start, end in bounds:
            run = bisect.bisect_right(runs, (chunk, start, sys.maxsize)) - 1
            first = runs[run][1]
            records.append(arrays[run][start - first : end - first].copy())  # the run itself may go
        return records

    def _keep(self, kept: dict[int, np.ndarray], suffix: str, dtype: np.dtype, chunks: Sequence[int]) -> None:
        """Read the files of chunks that have not been read yet."""
        missing = [chunk for chunk in chunks if chunk not in kept]
        for chunk, data in zip(missing, self._ranges(suffix, [(c, 0, None) for c in missing]), strict=True):
            kept[chunk] = np.frombuffer(data, dtype)

    def _ranges(self, suffix: str, ranges: Sequence[tuple[int, int, int | None]]) -> list[bytes]:
        if not ranges:
            return []
        paths = [self._name(chunk, suffix) for chunk, _, _ in ranges]
        starts, ends = [start for _, start, _ in ranges], [end for _, _, end in ranges]

        def read() -> list[bytes]:
            parts = self._fs.cat_ranges(paths, starts, ends, on_error="raise")
            for part in parts:  # asynchronous file systems return errors whatever `on_error` says
                if isinstance(part, BaseException):
                    raise part
            return parts

        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return call_storage(f"reading rows of {self._fs.unstrip_protocol(paths[0])}{more}", read, self._wait_s)


def _bounds(index: np.ndarray, place: int) -> tuple[int, int]:
    start, end = int(index[place]), int(index[place + 1])
    if not 0 <= start <= end:
        raise ValueError(f"row {place} of a chunk is at {start} to {end}")
    return start, end


def neighbouring(bounds: Sequence[tuple[int, int, int]], gap: int) -> list[tuple[int, int, int]]:
    """Join ranges, each a chunk, a start and an end, where less than ``gap`` is between two; in ascending order."""
    runs: list[tuple[int, int, int]] = []
    for chunk, start, end in sorted(bounds):
        if runs and runs[-1][0] == chunk and start - runs[-1][2] < gap:
            start, end = runs[-1][1], max(end, runs.pop()[2])
        runs.append((chunk, start, end))
    return runs


FIX = "Remove this directory: the data is then tokenised again."  # the fix for a cache that cannot be used
METADATA = "metadata.json"  # the file that makes a directory a finished cache; it is written last


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheMetadata:
    """The metadata of a cache.

    Args:
        chunk_rows: The number of rows of each chunk, those of the first bucket in all chunks, then of the next.
    """

    layout: Layout  # what a row holds
    lengths: tuple[int, ...]  # the tokens of a row of each bucket, ascending; one where rows are not put into buckets
    chunk_rows: tuple[int, ...]
    digests: tuple[str, ...]  # the SHA-256 of the rows of each chunk, in the same order
    examples: int
    unpacked_rows: int  # number of rows if each example had rows of its own
    tokens: int
    dropped: int  # examples left out because their prompts fill a row
    n_bad: int
    bad: tuple[str, ...]  # the first of them, each with its place and what is wrong

    def __post_init__(self) -> None:
        counts = (*self.chunk_rows, self.examples, self.unpacked_rows, self.tokens, self.dropped, self.n_bad)
        if min(counts) < 0 or min(self.lengths, default=0) < 1 or len(self.chunk_rows) % len(self.lengths):
            raise ValueError(f"numbers of rows and tokens cannot be {counts!r:.80} with rows of {self.lengths!r:.80}")

    @property
    def length(self) -> int:
        """The tokens of a row, the longest where rows have several lengths."""
        return self.lengths[-1]

    @property
    def bucket_rows(self) -> tuple[int, ...]:
        """The number of rows of each bucket."""
        n_chunks = len(self.chunk_rows) // len(self.lengths)
        return tuple(sum(rows) for rows in itertools.batched(self.chunk_rows, n_chunks))

    @property
    def nbytes(self) -> int:
        """The bytes of its rows and their index, but for the few of a row with many sequences."""
        return self.tokens * ROW.itemsize + sum(self.chunk_rows) * (3 * ROW.itemsize + INDEX.itemsize)

    @property
    def padding(self) -> float:
        """The share of all batches that is padding."""
        return self._padding(self.lengths)

    @property
    def padding_without_buckets(self) -> float:
        """The share of all batches that would be padding if all rows had the longest length."""
        return self._padding([self.length] * len(self.lengths))

    def _padding(self, lengths: Sequence[int]) -> float:
        positions = sum(rows * length for rows, length in zip(self.bucket_rows, lengths, strict=True))
        return 1 - self.tokens / (positions * (2 if self.layout == "pair" else 1)) if positions else 0.0

    @property
    def padding_without_packing(self) -> float:
        """The share of a batch that would be padding if each example had rows of its own."""
        return 1 - self.tokens / (self.unpacked_rows * self.length) if self.unpacked_rows else 0.0

    def summary(self) -> str:
        """The cache in a few words, with the waste before and after packing or buckets."""
        unit = "pairs" if self.layout == "pair" else "examples"
        rows = [f"{n:,} rows of {length}" for n, length in zip(self.bucket_rows, self.lengths, strict=True)]
        text = f"{self.examples:,} {unit}, {self.tokens:,} tokens in {', '.join(rows)}"
        without = f" ({self.padding_without_packing:.1%} without packing)" if self.layout == "packed" else ""
        if len(self.lengths) > 1:
            without = f" ({self.padding_without_buckets:.1%} without data.length_buckets)"
        return f"{text}, {self.padding:.1%} of it padding{without}"


class TokenCache:
    """The rows of a finished cache, see `RowReader`. It has the methods of a random-access data source of grain."""

    def __init__(
        self,
        fs: Any,
        path: str,
        metadata: CacheMetadata,
        *,
        resident: bool = True,
        wait_s: float = WAIT_S,
        vocab_size: int | None = None,
    ) -> None:
        self.path, self.metadata, self._vocab_size = path, metadata, vocab_size
        self.bucket_starts = np.cumsum([0, *metadata.bucket_rows])
        """The number of the first row of each bucket, and that of all rows."""
        name = functools.partial(chunk_file, path)
        self._reader = RowReader(fs, name, metadata.chunk_rows, resident=resident, wait_s=wait_s)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._reader)

    def __getitem__(self, number: int) -> Mapping[str, np.ndarray]:
        """Return the columns of one row."""
        return {name: column[0] for name, column in self.take([number]).items()}

    def take(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """Read some rows. All have the length of the longest among them.

        Returns:
            The columns ``tokens`` int32 ``[row, position]`` and ``loss_mask`` bool of the same shape, for packed rows
            ``segment_ids`` int32 too; for pairs ``[row, 2, position]``, chosen and rejected, and where the records
            have them ``reference_logprobs`` float32 ``[row, 2]``, or ``desirable`` bool ``[row]``.

        Raises:
            ConfigError: The files do not have rows as the metadata say, or one with a token that the model lacks.
        """
        records, length = self._read(numbers)
        with refused(self.path, FIX):
            return expand(records, self.metadata.layout, length)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Read some rows as the sequences that are in them."""
        rows = []
        for record in self._read(numbers)[0]:
            sequences, values = list(parse_record(record)), parse_values(record)
            sequence_values = [None] * len(sequences) if values is None else values.tolist()
            rows.append([TokenSequence(*parts, value) for parts, value in zip(sequences, sequence_values, strict=True)])
        return rows

    def _read(self, numbers: Sequence[int]) -> tuple[list[np.ndarray], int]:
        """Records and the tokens of their longest row."""
        bucket = int(np.searchsorted(self.bucket_starts, max(numbers), side="right")) - 1
        length = self.metadata.lengths[bucket]
        with refused(self.path, FIX):  # whoever writes to the directory may have written something else
            try:
                records = self._reader.read(numbers)
            except FileNotFoundError as error:
                raise ValueError(f"there is no {error.filename}") from None
            for record in records:
                check_record(record, self.metadata.layout, length, self._vocab_size)
        return records, length

    def digest(self) -> str:
        """Return the SHA-256 of all rows in hexadecimal digits."""
        metadata = self.metadata
        return hashlib.sha256(repr((metadata.layout, *metadata.lengths, metadata.digests)).encode()).hexdigest()


def expand(records: Sequence[np.ndarray], layout: Layout, length: int) -> dict[str, np.ndarray]:
    """Make the columns of rows, see `TokenCache.take`.

    The first token of a sequence is never a target. In a packed row the documents are numbered from 1, and padding
    has the number 0.
    """
    shape = (len(records), 2, length) if layout == "pair" else (len(records), 1, length)
    tokens, mask, segments = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32)
    for row, record in enumerate(records):
        start = side = 0
        for number, (n_prompt, sequence) in enumerate(parse_record(record)):
            if layout == "pair":
                start, side = 0, number
            end = start + len(sequence)
            tokens[row, side, start:end] = np.where(sequence < 0, ~sequence, sequence)
            first = max(n_prompt, 1)
            mask[row, side, start + first : end] = sequence[first:] >= 0
            if layout == "packed":
                segments[row, side, start:end] = number + 1
            start = end
    columns = {"tokens": tokens, "loss_mask": mask} | ({"segment_ids": segments} if layout == "packed" else {})
    if layout != "pair":
        columns = {name: column[:, 0] for name, column in columns.items()}
    values = [value for value in map(parse_values, records) if value is not None]
    if not values:
        return columns
    if len(values) < len(records):
        raise ValueError(f"{len(values)} of {len(records)} rows have values")
    if layout == "pair":
        return columns | {REFERENCE: np.stack(values)}
    labels = np.concatenate(values)
    if not np.isin(labels, (0, 1)).all() or np.signbit(labels).any():
        raise ValueError(f"rows have the labels {labels.tolist()!r:.80}")
    return columns | {DESIRABLE: labels == 1}


def chunk_file(path: str, chunk: int, suffix: str) -> str:
    """Return the path of a file of a chunk."""
    return f"{path}/chunk-{chunk:05d}.{suffix}"


def read_metadata(fs: Any, path: str) -> CacheMetadata | None:
    """Return what is in a cache; None where it is not finished."""
    try:
        text = read_object(fs, f"{path}/{METADATA}")
    except FileNotFoundError:
        return None
    values = parse_json(text, f"{path}/{METADATA}", dict, FIX)
    with refused(f"{path}/{METADATA}", FIX):
        return typed(CacheMetadata, values)
