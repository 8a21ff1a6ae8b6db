"""Rows on disk: a file of whole lines per host, and an index of where each row is in all of them."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from lockstep.batch_inference.shard import JobShape
from lockstep.credentials import get_logger
from lockstep.errors import ConfigError
from lockstep.json_text import parse_json
from lockstep.report import append_jsonl, repair_jsonl

log = get_logger(__name__)

PATTERN = "samples-host-*.jsonl"
"""The pattern of the names of files with rows."""
NOWHERE = -1
"""The file number of a row that is in no file, and the host number of a row that no host has."""


def host_name(host: int) -> str:
    """Return the beginning of the names of a host's files."""
    return f"samples-host-{host:03d}"


def host_file(directory: Path, host: int) -> Path:
    """Return the file in which a host writes its rows."""
    return directory / f"{host_name(host)}.jsonl"


class RowIndex:
    """Which of a job's rows are in the files of a directory, and where: 14 bytes of memory per row of the job.

    Args:
        shape: The rows of the job.
    """

    def __init__(self, shape: JobShape) -> None:
        self.shape = shape
        self.files: list[Path] = []
        self._file = np.full(shape.rows, NOWHERE, np.int16)
        self._offset = np.zeros(shape.rows, np.int64)
        self._size = np.zeros(shape.rows, np.int32)

    @property
    def present(self) -> Bool[np.ndarray, " rows"]:
        """Whether each row of the job is in a file."""
        return self._file != NOWHERE

    def scan(self, directory: Path) -> None:
        """Add the rows of every file in a directory, whichever host wrote it."""
        for path in sorted(directory.glob(PATTERN)):
            self.scan_file(path)

    def scan_file(self, path: Path, start: int = 0) -> int:
        """Add the rows of a file; where a row is in several files, the first one counts.

        Args:
            path: A file of JSON lines. A partial last line, as a killed process leaves it, is ignored.
            start: The byte from which on to read.

        Returns:
            The number of lines that are no rows of this job, which are ignored.
        """
        if path not in self.files:
            self.files.append(path)
        number, foreign = self.files.index(path), 0
        with open(path, "rb") as file:
            file.seek(start)
            offset = start
            for line in file:
                row = _row_number(line, self.shape) if line.endswith(b"\n") else None
                if row is None:
                    foreign += line.endswith(b"\n")
                elif self._file[row] == NOWHERE:
                    self._file[row], self._offset[row], self._size[row] = number, offset, len(line)
                offset += len(line)
        if foreign:
            log.warning("%s has %d lines that are no rows of this job; they are left out", path, foreign)
        return foreign

    def read(self, rows: Iterable[int]) -> Iterator[bytes]:
        """Yield the lines of rows that are present, in the order of ``rows``."""
        opened: dict[int, int] = {}
        try:
            for row in rows:
                number = int(self._file[row])
                assert number != NOWHERE, row
                if number not in opened:
                    opened[number] = os.open(self.files[number], os.O_RDONLY)
                line = os.pread(opened[number], int(self._size[row]), int(self._offset[row]))
                yield line
        finally:
            for descriptor in opened.values():
                os.close(descriptor)


class RowFile:
    """This host's file of rows, which keeps the index up to date.

    Args:
        path: The file; a partial last line is removed.
        index: The index to which written rows are added.
        upload: Called with the lines of each batch once they are written; None for no upload.
    """

    def __init__(self, path: Path, index: RowIndex, upload: Callable[[bytes], None] | None = None) -> None:
        self.path, self._index, self._upload = path, index, upload
        repair_jsonl(path)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows in one write; when this returns, they survive a crash and are uploaded too."""
        start = self.path.stat().st_size if self.path.exists() else 0
        append_jsonl(self.path, rows, fsync=True)
        self._index.scan_file(self.path, start)
        if self._upload is not None:
            with open(self.path, "rb") as file:
                file.seek(start)
                self._upload(file.read())


def pack(flags: Bool[np.ndarray, " rows"]) -> bytes:
    """Pack flags to send them, a bit each."""
    return np.packbits(flags).tobytes()


def unpack(data: bytes, count: int) -> Bool[np.ndarray, " rows"]:
    """Return the ``count`` flags that `pack` was given."""
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool)


def owners(present: list[Bool[np.ndarray, " rows"]]) -> Int[np.ndarray, " rows"]:
    """Return for each row the first host that has it, `NOWHERE` where none has.

    Args:
        present: Whether each row is present, by host.
    """
    stacked = np.stack(present)
    return np.where(stacked.any(axis=0), stacked.argmax(axis=0), NOWHERE).astype(np.int16)


def _row_number(line: bytes, shape: JobShape) -> int | None:
    """Return the number of the row on a line; None where it is no row of the job."""
    try:
        record = parse_json(line, "a row", dict, "")
        numbers = [record[name] for name in ("round", "prompt_id", "generation_id")]
        return shape.row(*numbers) if all(type(each) is int for each in numbers) else None
    except (ConfigError, KeyError):
        return None
