"""All hosts' rows in one ordered file on the leader, of which only a part is in memory at a time."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int

from lockstep.batch_inference.row_files import NOWHERE, RowIndex, owners, pack, unpack
from lockstep.errors import LockstepError
from lockstep.hosts import Hosts

GATHER_BYTES = 32 << 20
"""Bytes that all hosts together send to the leader at a time, at most (a single row that is longer goes alone)."""
MERGED = "samples.jsonl"
"""The name of the merged file."""


def agree_on_owners(hosts: Hosts, index: RowIndex) -> Int[np.ndarray, " rows"]:
    """Return for each row the host that counts and sends it: the first that has the row on a disk that it can read.

    Args:
        hosts: The processes of the job, all of which make this call.
        index: The rows that this host can read.

    Returns:
        Process numbers, the same on every host; `NOWHERE` for rows that no host has.
    """
    posts = hosts.gather("present rows", pack(index.present))
    found: bytes | None = None
    if posts is not None:
        found = owners([unpack(post, index.shape.rows) for post in posts]).tobytes()
    return np.frombuffer(hosts.broadcast("owners of rows", found), np.int16)


def merge(hosts: Hosts, index: RowIndex, owner: Int[np.ndarray, " rows"], directory: Path) -> Path | None:
    """Write every row of the job into one file on the leader, by round, prompt and generation.

    Rows are sent in turns of at most `GATHER_BYTES` and stay on the leader's disk until they are written in order.
    The file appears under its name only when it is complete.

    Args:
        hosts: The processes of the job, all of which make this call.
        index: The rows that this host can read.
        owner: The host that sends each row, as `agree_on_owners` returned it.
        directory: The directory of the leader's files.

    Returns:
        The file, on the leader; None elsewhere.

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
            file = stack.enter_context(open(gathered, "wb")) if hosts.is_leader else None
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
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        for line in index.read(range(rows)):
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
