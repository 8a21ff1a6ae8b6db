"""A file of JSON lines that is read while it is written, also when its writer goes back and replaces it."""

import dataclasses
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

from lockstep.report.jsonl import parse_record

_CHECKED: Final = 256
"""Bytes before the place read up to that must still be there, or the file is another one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class News:
    """What has happened to a file since it was last looked at.

    Args:
        taken_back: The number of records, the last ones that were read, that are not in the file any more.
        records: The records that are new, each with its place for errors.
    """

    taken_back: int
    records: list[tuple[str, dict[str, Any]]]


class FollowedFile:
    """Reads what is appended to a file, by offset.

    A run that goes on from a checkpoint writes its files anew without what came after it. Then the file is read from
    its beginning, and only what was not there before counts as new.

    Args:
        path: The file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._offset, self._before = -1, 0, b""
        self._lines: list[int] = []
        """A hash of each line that was read."""

    def look(self, *, at_end: bool = False) -> News:
        """Return what is new.

        Args:
            at_end: Whether nobody writes any more, so that a last line may lack its newline.

        Raises:
            LockstepError: A whole line is not a JSON object; the message has file and line.
            OSError: The file cannot be read.
        """
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:  # not written yet
            return News(taken_back=0, records=[])
        with file:
            kept = len(self._lines) if self._goes_on(file) else 0
            file.seek(self._offset if kept else 0)
            content = file.read()
            end = len(content) if at_end and content[-1:] == b"}" else content.rfind(b"\n") + 1
            lines = content[:end].split(b"\n")[: None if at_end and content[-1:] == b"}" else -1]
            offset = (self._offset if kept else 0) + end
            file.seek(max(0, offset - _CHECKED))
            self._inode, self._offset = os.fstat(file.fileno()).st_ino, offset
            self._before = file.read(offset - file.tell())
        hashes = [hash(line) for line in lines]
        same = 0
        if not kept:
            while same < min(len(hashes), len(self._lines)) and hashes[same] == self._lines[same]:
                same += 1
        taken_back = 0 if kept else len(self._lines) - same
        first = kept + same
        self._lines = self._lines[:first] + hashes[same:]
        new = [(f"{self.path}:{first + place}", line) for place, line in enumerate(lines[same:], start=1)]
        return News(
            taken_back=taken_back,
            records=[(place, parse_record(line, place)) for place, line in new if line.strip()],
        )

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether the file is the one that was read, with the same content up to the place read up to."""
        stat = os.fstat(file.fileno())
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._before))
        return file.read(len(self._before)) == self._before
