"""Rows on disk: a file per host with its index, the manifest of the job, the copy behind a URL, the merged file."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from lockstep.batch_inference.prompt_store import JobShape
from lockstep.errors import ConfigError, HostError, LockstepError
from lockstep.files import in_place, new_file, write_file
from lockstep.hosts import Hosts
from lockstep.json_text import FOREIGN, parse_json, refused
from lockstep.limits import read_object, read_small
from lockstep.printable import get_logger, without_credentials
from lockstep.report import append_jsonl, repair_jsonl
from lockstep.text import TEMPLATE_DATE
from lockstep.urls import url_to_fs

log = get_logger(__name__)

PATTERN = "samples-host-*.jsonl"  # the pattern of the names of files with rows
NOWHERE = -1  # the file number of a row that is in no file, and the host number of a row that no host has


def host_name(host: int) -> str:
    """Return the beginning of the names of a host's files."""
    return f"samples-host-{host:03d}"


def host_file(directory: Path, host: int) -> Path:
    """Return the file in which a host writes its rows."""
    return directory / f"{host_name(host)}.jsonl"


class RowIndex:
    """Which of a job's rows are in the files of a directory, and where: 14 bytes of memory per row of the job."""

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
        """Add the rows of every file in a directory that was not read yet, whichever host wrote it."""
        for path in sorted(set(directory.glob(PATTERN)) - set(self.files)):
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
    """Return for each row the first host that has it, `NOWHERE` where none has."""
    stacked = np.stack(present)
    return np.where(stacked.any(axis=0), stacked.argmax(axis=0), NOWHERE).astype(np.int16)


def _row_number(line: bytes, shape: JobShape) -> int | None:
    """Return the number of the row on a line; None where it is no row of the job."""
    try:
        record = parse_json(line, "a row", dict, "")
        numbers = [record[name] for name in ("round", "prompt_id", "generation_id")]
        return shape.row(*numbers) if all(type(value) is int for value in numbers) else None
    except (ConfigError, KeyError):
        return None


MANIFEST = "job.json"  # the name of the manifest's file
_FIX = "Choose another trainer.run_id or host_data_parallel_output_dir, or remove the directory."


def check_manifest(directory: Path, manifest: Mapping[str, Any], *, force: bool) -> list[str]:
    """Compare a job with the one whose rows are in a directory.

    Args:
        manifest: Everything that decides what the rows are, by name.
        force: Whether to go on whatever differs.

    Returns:
        A line for each difference that was overridden by ``force``.

    Raises:
        ConfigError: The rows come from another job; the message names what differs.
    """
    path = directory / MANIFEST
    text = read_small(path) if path.exists() else None
    return _check(str(directory), text, lambda: any(directory.glob(PATTERN)), manifest, force)


def _check(
    place: str, text: bytes | None, has_rows: Callable[[], bool], manifest: Mapping[str, Any], force: bool
) -> list[str]:
    if text is None:
        if not force and has_rows():
            raise ConfigError(
                f"{place} has rows but no {MANIFEST}, so it is not known which job they come from. Choose another "
                "trainer.run_id or host_data_parallel_output_dir, remove the rows, or keep them with --resume force."
            )
        return []
    before = parse_json(text, f"{place}/{MANIFEST}", dict, _FIX)
    different = [name for name in {**before, **manifest} if before.get(name) != manifest.get(name)]
    lines = [f"{name} was {_as_json(before.get(name))} and is {_as_json(manifest.get(name))}" for name in different]
    if lines and not force:
        raise ConfigError(
            f"{place} has rows of a job that differs from this one: {'; '.join(lines)}. Change that back, "
            "choose another trainer.run_id or host_data_parallel_output_dir, remove the directory, or keep its rows "
            "and go on with --resume force."
        )
    return lines


def kept_template_date(directory: Path, remote: "RemoteRows | None") -> str | None:
    """Return the date of the chat template that the manifest of an earlier start has; None where there is none."""
    path = directory / MANIFEST
    text = read_small(path) if path.exists() else None if remote is None else remote.manifest()
    return None if text is None else parse_json(text, f"{directory}/{MANIFEST}", dict, _FIX).get(TEMPLATE_DATE)


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> Path:
    """Write the manifest, whole or not at all; hosts that share the directory write the same."""
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return directory / MANIFEST


def _as_json(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:60]} … {text[-40:]}"


class RemoteRows:
    """An output directory behind a URL. The hosts work on local files; what they add to them is uploaded as they go.

    Object stores cannot append, so each batch of a host is an object of its own. It appears whole or not at all: a
    process that is killed leaves no torn line there.
    """

    def __init__(self, url: str, host: int) -> None:
        self.url = url.rstrip("/")
        self._filesystem, root = url_to_fs(self.url)
        self._root, self._host = root.rstrip("/"), host
        # Unique, so that no two processes write the same object, also where a run is started again.
        self._name, self._batches = f"{host_name(host)}-{uuid.uuid4().hex[:8]}", 0

    def check(self, manifest: Mapping[str, Any], *, force: bool) -> list[str]:
        """Compare a job with the one whose rows are there, as `check_manifest` does; nothing is written here."""
        text, url = self.manifest(), without_credentials(self.url)
        return _check(url, text, lambda: bool(self._filesystem.glob(f"{self._root}/{PATTERN}")), manifest, force)

    def manifest(self) -> bytes | None:
        """Return the manifest that is there."""
        self._filesystem.invalidate_cache()
        place = f"{self._root}/{MANIFEST}"
        return read_object(self._filesystem, place) if self._filesystem.exists(place) else None

    def fetch(self, directory: Path, hosts: int) -> Path | None:
        """Copy this host's part of the rows that earlier runs left into a file and return it; None without a part.

        The file counts as rows of the job whose manifest is in the directory: compare it first.
        """
        self._filesystem.invalidate_cache()
        objects = sorted(self._filesystem.glob(f"{self._root}/{PATTERN}"))
        path = directory / f"{host_name(self._host)}-found.jsonl"
        own = objects[self._host :: hosts]
        if not own:
            path.unlink(missing_ok=True)
            return None
        with new_file(path) as file:
            for source in own:
                with self._filesystem.open(source, "rb") as rows:
                    shutil.copyfileobj(rows, file)
        return path

    def add(self, lines: bytes) -> None:
        """Upload a batch of rows; when this returns they are there."""
        self._filesystem.pipe_file(f"{self._root}/{self._name}-{self._batches:06d}.jsonl", lines)
        self._batches += 1

    def put(self, path: Path) -> None:
        """Upload a file under its name."""
        self._filesystem.put_file(str(path), f"{self._root}/{path.name}")


GATHER_BYTES = 32 << 20
"""Bytes that all hosts together send to the leader at a time, at most (a single row that is longer goes alone)."""
MERGED = "samples.jsonl"  # the name of the merged file


def agree_on_owners(hosts: Hosts, index: RowIndex) -> Int[np.ndarray, " rows"]:
    """Return for each row the host that counts and sends it: the first that has the row on a disk that it can read."""
    posts = hosts.gather("present rows", pack(index.present))
    owner_bytes: bytes | None = None
    if posts is not None:
        owner_bytes = owners([unpack(post, index.shape.rows) for post in posts]).tobytes()
    data = hosts.broadcast("owners of rows", owner_bytes)
    with refused("the leader's list of rows", FOREIGN, HostError):
        owner = np.frombuffer(data, np.int16)
        if len(owner) != index.shape.rows or ((owner < NOWHERE) | (owner >= hosts.count)).any():
            raise ValueError("it is of another job")
        return owner


def union(hosts: Hosts, name: str, present: Bool[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
    """Return whether each row is present on any host, the same on every host."""
    with hosts.scope(name) as scope:
        posts = scope.gather("present", pack(present))
        on_any: bytes | None = None
        if posts is not None:
            on_any = pack(np.any([unpack(post, len(present)) for post in posts], axis=0))
        return unpack(scope.broadcast("on any", on_any), len(present))


def upload_rows(hosts: Hosts, remote: RemoteRows, index: RowIndex, rows: Bool[np.ndarray, " rows"]) -> None:
    """Upload rows that are on the hosts' disks, each by one host that has it.

    Args:
        rows: Which rows, the same on every host.

    Raises:
        PeerError: A host could not upload its part; raised on every host.
    """
    if not rows.any():
        return
    with hosts.scope("earlier rows") as scope:
        owner = agree_on_owners(scope, index)
        with scope.run_on_all("upload", "uploading rows of an earlier run"):
            for piece in _pieces(index, np.flatnonzero(rows & (owner == hosts.index)), GATHER_BYTES):
                remote.add(piece)


def merge(hosts: Hosts, index: RowIndex, owner: Int[np.ndarray, " rows"], directory: Path) -> Path | None:
    """Write every row into one file on the leader, by round, prompt and generation; return it there, else None.

    Rows are sent in turns of at most `GATHER_BYTES` and stay on the leader's disk until they are written in order.
    The file appears under its name only when it is complete.

    Args:
        owner: The host that sends each row, as `agree_on_owners` returned it.

    Raises:
        PeerError: A host could not read its rows, or the leader could not write them; raised on every host.
        LockstepError: A row is missing; raised on every host.
    """
    missing = int((owner == NOWHERE).sum())
    if missing:
        raise LockstepError(
            f"{missing} of {len(owner)} rows are on no host's disk (the first is row {int(np.argmax(owner == NOWHERE))}"
            "). Start the command again: it generates what is missing."
        )
    path = directory / MERGED
    gathered = directory / f".{MERGED}.gathered.tmp"
    with hosts.scope("merge") as scope:
        own = np.flatnonzero(owner == hosts.index) if not hosts.is_leader else np.zeros(0, np.int64)
        pieces = _pieces(index, own, GATHER_BYTES // hosts.count)
        turn = 0
        with contextlib.ExitStack() as stack:
            file = None
            if hosts.is_leader:
                gathered.unlink(missing_ok=True)  # of a process that was killed
                file = stack.enter_context(open(gathered, "xb", opener=in_place))
            while True:
                piece = b""
                with scope.run_on_all(f"read {turn}", "gathering rows"):
                    piece = next(pieces, b"")
                received = scope.gather(f"rows {turn}", piece)
                with scope.run_on_all(f"keep {turn}", "gathering rows"):
                    if received is not None and file is not None:
                        file.writelines(received)
                more = None if received is None else (b"more" if any(received) else b"end")
                if scope.broadcast(f"more {turn}", more) == b"end":
                    break
                turn += 1
        with scope.run_on_all("write", "gathering rows"):
            if hosts.is_leader:
                index.scan_file(gathered)
                _write(path, index, len(owner))
                os.remove(gathered)
        scope.barrier("end")
    return path if hosts.is_leader else None


def _pieces(index: RowIndex, rows: Int[np.ndarray, " own"], limit: int) -> Iterator[bytes]:
    """Yield the lines of rows in pieces of at most ``limit`` bytes; a line that is longer is a piece of its own."""
    piece = bytearray()
    for line in index.read(rows):
        if piece and len(piece) + len(line) > limit:
            yield bytes(piece)
            piece.clear()
        piece += line
    if piece:
        yield bytes(piece)


def _write(path: Path, index: RowIndex, rows: int) -> None:
    with new_file(path, fsync=True) as file:
        for line in index.read(range(rows)):
            file.write(line)
