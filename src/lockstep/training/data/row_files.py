"""Rows of any length on disk or in a bucket, and any of them read at once.

The rows of a chunk are in two files: ``chunk-N.rows``, all of them one after the other as int32, and
``chunk-N.index``, the beginning of each and the end of the last as int64. A row is the number of its sequences, then
the number of prompt tokens and of all tokens of each, then the tokens; last, where the records have them, the float32
log-probability of each under a reference model. What a reader needs of it are two ranges, so a
host reads its own rows and nothing else.
"""

import contextlib
import functools
import glob
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import fsspec
import numpy as np
from jaxtyping import Float, Int

from lockstep.training.data.packing import Row

ROW, INDEX, LOGPROB = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
FLUSH_ROWS = 1000
DEAD_S = 3600.0
OPEN_CHUNKS = 128
"""Chunks whose files are mapped into memory at a time; each takes two file descriptors."""


@contextlib.contextmanager
def new_file(fs: Any, path: str) -> Iterator[BinaryIO]:
    """Write a file that appears as a whole, or in a bucket when it is closed.

    Args:
        fs: The file system.
        path: The path of the file.
    """
    if not is_local(fs):
        with fs.open(path, "wb") as stream:
            yield stream
        return
    # Another job may read or write the same cache: what it has mapped must not change.
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "wb") as stream:
            yield stream
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def remove_dead_files(directory: str) -> None:
    """Remove what processes that were killed were writing; one that lives has written to its file since.

    Args:
        directory: A local directory.
    """
    for path in glob.glob(f"{glob.escape(directory)}/*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.path.getmtime(path) > DEAD_S:
                os.remove(path)


def is_local(fs: Any) -> bool:
    """Whether files of a file system can be mapped into memory."""
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


class RowWriter:
    """Writes the rows of a chunk.

    Args:
        rows: The open file of the rows.
        index: The open file of their beginnings.
    """

    def __init__(self, rows: BinaryIO, index: BinaryIO) -> None:
        self._rows, self._index, self._hash = rows, index, hashlib.sha256()
        self._waiting: list[np.ndarray] = []
        self._ends = [0]
        self.count = 0
        """The rows written so far."""
        self.tokens = 0
        """Their tokens."""

    def write(self, row: Row) -> None:
        """Write a row."""
        header = [len(row), *(number for one in row for number in (one.n_prompt, len(one.tokens)))]
        reference = np.asarray([one.reference for one in row if one.reference is not None], LOGPROB).view(ROW)
        record = np.concatenate([np.asarray(part, ROW) for part in (header, *(one.tokens for one in row), reference)])
        self._waiting.append(record)
        self._ends.append(self._ends[-1] + len(record))
        self.count += 1
        self.tokens += sum(len(one.tokens) for one in row)
        if len(self._waiting) >= FLUSH_ROWS:
            self._flush(self._ends.pop())

    def finish(self) -> str:
        """Write what is left.

        Returns:
            The SHA-256 of all rows in hexadecimal digits.
        """
        self._flush(None)
        return self._hash.hexdigest()

    def _flush(self, last: int | None) -> None:
        data = np.concatenate(self._waiting).tobytes() if self._waiting else b""
        self._hash.update(data)
        self._rows.write(data)
        self._index.write(np.asarray(self._ends, INDEX).tobytes())
        self._waiting, self._ends = [], [] if last is None else [last]


class RowReader:
    """Reads rows of chunks by their numbers.

    Args:
        fs: The file system.
        name: A function from the number of a chunk and a suffix to the path of its file.
        counts: The number of rows of each chunk.
    """

    def __init__(self, fs: Any, name: Callable[[int, str], str], counts: Sequence[int]) -> None:
        self._fs, self._name = fs, name
        self._ends = np.cumsum(np.asarray(counts, np.int64))
        self._mapped = functools.lru_cache(maxsize=OPEN_CHUNKS)(self._map)

    def __len__(self) -> int:
        """Return the number of rows of all chunks."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: Sequence[int]) -> list[Int[np.ndarray, " record"]]:
        """Read some rows.

        Args:
            numbers: The numbers of the rows over all chunks.

        Returns:
            Their records, see `parse_record`.
        """
        chunks = np.searchsorted(self._ends, np.asarray(numbers), side="right")
        starts = np.concatenate([[0], self._ends])[chunks]
        places = [(int(c), int(number - start)) for c, number, start in zip(chunks, numbers, starts, strict=True)]
        return self._read_mapped(places) if is_local(self._fs) else self._read_ranges(places)

    def _read_mapped(self, places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        found = []
        for chunk, place in places:
            index, rows = self._mapped(chunk)
            found.append(rows[index[place] : index[place + 1]])
        return found

    def _map(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        # As plain arrays: each slice of a np.memmap runs Python of its class.
        index = np.memmap(self._name(chunk, "index"), INDEX, "r")
        rows = np.memmap(self._name(chunk, "rows"), ROW, "r")
        return np.asarray(index), np.asarray(rows)

    def _read_ranges(self, places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        size = INDEX.itemsize
        index = self._ranges("index", [(c, place * size, (place + 2) * size) for c, place in places])
        bounds = [np.frombuffer(data, INDEX) * ROW.itemsize for data in index]
        rows = self._ranges(
            "rows", [(c, int(start), int(end)) for (c, _), (start, end) in zip(places, bounds, strict=True)]
        )
        return [np.frombuffer(data, ROW) for data in rows]

    def _ranges(self, suffix: str, ranges: Sequence[tuple[int, int, int]]) -> list[bytes]:
        paths = [self._name(chunk, suffix) for chunk, _, _ in ranges]
        starts, ends = [start for _, start, _ in ranges], [end for _, _, end in ranges]
        return self._fs.cat_ranges(paths, starts, ends, on_error="raise")


def parse_record(record: Int[np.ndarray, " record"]) -> Iterator[tuple[int, Int[np.ndarray, " token"]]]:
    """Yield the number of prompt tokens and all tokens of each sequence of a record."""
    n_sequences = int(record[0])
    start = 1 + 2 * n_sequences
    header = record[1:start].tolist()
    for n_prompt, size in zip(header[::2], header[1::2], strict=True):
        yield n_prompt, record[start : start + size]
        start += size


def parse_reference(record: Int[np.ndarray, " record"]) -> Float[np.ndarray, " sequence"] | None:
    """Return the log-probability of each sequence of a record under a reference model; None where it has none."""
    n_sequences = int(record[0])
    start = 1 + 2 * n_sequences
    rest = record[start + int(record[2:start:2].sum()) :]
    return rest.view(LOGPROB) if len(rest) else None
