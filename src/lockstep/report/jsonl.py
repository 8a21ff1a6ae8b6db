"""JSON lines on a local disk, whole lines only."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.errors import ConfigError, LockstepError
from lockstep.files import in_place, new_file
from lockstep.json_text import parse_json
from lockstep.printable import get_logger

log = get_logger(__name__)

NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The floats that JSON cannot express, by their names in our JSON lines."""


def named_float(value: float) -> float | str:
    """A float, or its name where JSON cannot express it."""
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_float(value: Any) -> float | None:
    """The number that a value of JSON lines is, or is the name of; None for any other value."""
    if isinstance(value, str):
        return NOT_FINITE.get(value)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def append_jsonl(path: str | os.PathLike[str], records: Iterable[Mapping[str, Any]], *, fsync: bool = False) -> None:
    """Append a line per record, all in one write.

    A process killed in the middle of a write leaves a torn last line: it is removed first, with a warning. A float
    that JSON cannot express is written as the text ``NaN``, ``Infinity`` or ``-Infinity``; half of a surrogate pair,
    which UTF-8 cannot express, as JSON's escape of it.

    Args:
        fsync: Whether to return only when the disk has the lines.

    Raises:
        ConfigError: The path is a URL.
    """
    if "://" in os.fspath(path):
        raise ConfigError(
            f"JSON lines cannot be appended to {os.fspath(path)!r}: object stores have no append. Use a local path."
        )
    lines = b"".join(_line(record) for record in records)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    repair_jsonl(path)
    with open(path, "ab", buffering=0, opener=in_place) as file:
        view = memoryview(lines)
        while view:
            view = view[file.write(view) :]
        if fsync:
            os.fsync(file.fileno())


def repair_jsonl(path: str | os.PathLike[str]) -> int:
    """Make the file end with a whole line.

    Returns:
        The number of bytes of a torn last line that were removed; 0 where the file was whole or only its last newline
        was missing.
    """
    if not os.path.exists(path):
        return 0
    with open(path, "rb+", opener=in_place) as file:
        tail = _last_line(file)
        if not tail:
            return 0
        if _is_json(tail):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            return 0
        size = file.seek(0, os.SEEK_END)
        log.warning("%s ends in a torn line (a process was killed while writing); removed: %r", path, tail[:200])
        file.truncate(size - len(tail))
        return len(tail)


def drop_later(path: str | os.PathLike[str], step: int) -> int:
    """Remove the records of steps after one: a run that goes on from there writes them again.

    Returns:
        The number of lines that were removed. Those that are no whole records are among them, and are warned of.
    """
    if not os.path.exists(path):
        return 0
    dropped = 0
    damaged: list[int] = []
    with open(path, "rb", opener=in_place) as file, new_file(path, fsync=True) as kept:
        for number, line in enumerate(file, start=1):
            whole = _is_json(line)
            if whole and _step(json.loads(line), step) <= step:
                kept.write(line.rstrip(b"\n") + b"\n")
                continue
            dropped += 1
            if not whole:
                damaged.append(number)
    if damaged:
        log.warning(
            "%s: %d damaged lines are removed, which are no JSON objects; the first was line %d. Their step is not "
            "known: a row of an earlier step may be lost",
            path,
            len(damaged),
            damaged[0],
        )
    return dropped


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read every whole line; a torn last line is left out with a warning."""
    numbered, torn = numbered_records(path)
    if torn is not None:
        log.warning("%s:%d is a torn line (a process was killed while writing); left out", path, torn)
    return [record for _, record in numbered]


def numbered_records(path: str | os.PathLike[str]) -> tuple[list[tuple[int, dict[str, Any]]], int | None]:
    """Read every whole line with its number, of a file that may still be written.

    Returns:
        The line numbers, from 1, with their objects; and the number of a last line that is not whole, or None.

    Raises:
        LockstepError: A line before the last is not a JSON object; the message names the file and the line.
    """
    records, torn = [], None
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == len(lines) and not _is_whole(line):
            torn = number
            continue
        records.append((number, parse_record(line, f"{path}:{number}")))
    return records, torn


def whole_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that have something in them, with their numbers from 1, but for a last one that is not whole."""
    for number, line in enumerate(lines, start=1):
        if line.strip() and (line.endswith(b"\n") or _is_whole(line)):
            yield number, line


def parse_record(line: bytes, place: str) -> dict[str, Any]:
    """Return the object of a line."""
    return parse_json(line, place, dict, "Remove or mend the line.", LockstepError)


def _line(record: Mapping[str, Any]) -> bytes:
    strict = _strict(record)
    try:
        return json.dumps(strict, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which the escapes of ASCII can express
        return json.dumps(strict).encode() + b"\n"


def _last_line(file: Any) -> bytes:
    """The bytes after the last newline, read backwards in blocks."""
    end = file.seek(0, os.SEEK_END)
    tail = b""
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        block = file.read(end - start)
        newline = block.rfind(b"\n")
        if newline >= 0:
            return bytes(block[newline + 1 :] + tail)
        tail, end = block + tail, start
    return tail


def _is_whole(line: bytes) -> bool:
    """Whether a line without a newline is JSON, and not the beginning of it."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _step(record: Mapping[str, Any], otherwise: int) -> float:
    """The step of a record; a record of no step stays."""
    step = record.get("step", otherwise)
    return step if isinstance(step, int | float) else otherwise


def _strict(value: Any) -> Any:
    """The value with floats that JSON cannot express as texts."""
    if isinstance(value, float):
        return named_float(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
