"""Rows as Parquet, where pyarrow is installed."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.json_text import refused
from lockstep.report.jsonl import parse_record
from lockstep.report.rows import FIELDS

_ROWS = 4096
"""Rows that are in memory at a time."""
_TEXTS = ("prompt", "generated_text", "answer")
"""Columns that are texts, also where every text of a model's happens to be NaN."""
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""The floats that JSON cannot express, by their names in our JSON lines."""
TEXTS, NUMBERS = frozenset(("text", "not finite")), frozenset(("int", "float", "not finite"))
"""Kinds of values that a column may have together."""


def check_pyarrow() -> None:
    """Check before hours of work that Parquet can be written.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    _pyarrow()


def write_parquet(lines: Path, output: Path | None = None) -> Path:
    """Write the rows of a file of JSON lines as Parquet.

    A column is there if any row has it; a row without it has none there. Numbers of which one is a float are floats.

    Args:
        lines: A file of at least one whole line.
        output: The Parquet file; None: beside the lines, with the suffix ``.parquet``.

    Returns:
        The Parquet file; it appears under its name only when it is complete.

    Raises:
        ConfigError: pyarrow is not installed.
        LockstepError: The file has no row, or a column that is a text in one row and something else in another.
    """
    pa, pq = _pyarrow()
    path = lines.with_suffix(".parquet") if output is None else output
    kinds = _columns(lines)
    types = {"text": pa.string(), "float": pa.float64(), "int": pa.int64(), "bool": pa.bool_()}
    types |= {f"list of {kind}": pa.list_(types[kind]) for kind in ("text", "float", "int")}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with refused(f"{lines} as Parquet", "Correct the rows.", LockstepError):
            schema = pa.schema([(_text(name), types[kind]) for name, kind in kinds.items()])
            with pq.ParquetWriter(temporary, schema) as writer:
                rows = _rows(lines)
                while some := [_typed(row, kinds) for row in itertools.islice(rows, _ROWS)]:
                    writer.write_table(pa.Table.from_pylist(some, schema=schema))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _rows(lines: Path) -> Iterator[dict[str, Any]]:
    with open(lines, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                row = parse_record(line, f"{lines}:{number}")
                # Objects of users have no one type: they are texts of JSON here.
                yield row | {FIELDS: json.dumps(row[FIELDS])} if isinstance(row.get(FIELDS), dict) else row


def _columns(lines: Path) -> dict[str, str]:
    """The columns in order of first appearance, and what is in each."""
    found: dict[str, set[str]] = {}
    for row in _rows(lines):
        for name, value in row.items():
            found.setdefault(name, set()).add(_kind(value))
    if not found:
        raise LockstepError(f"{lines} has no row. Give a file with some.")
    return {name: _one_kind(lines, name, kinds) for name, kinds in found.items()}


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(2**63) <= value < 2**63 else "float"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "not finite" if value in _NOT_FINITE else "text"
    if isinstance(value, list):
        inside = {_kind(each) for each in value} - {"none"}
        if len(inside) < 2:
            return "none" if not inside else f"list of {inside.pop()}"
        return f"list of {'text' if inside == TEXTS else 'float' if inside <= NUMBERS else 'several kinds'}"
    return type(value).__name__


def _one_kind(lines: Path, name: str, kinds: set[str]) -> str:
    kinds = kinds - {"none"}
    if name in _TEXTS and kinds <= TEXTS:
        return "text"
    if not kinds or kinds <= NUMBERS:
        # What has no value in any row is a metric, and metrics are numbers; so is what is nowhere finite.
        return "int" if kinds == {"int"} else "float"
    if kinds <= TEXTS:
        return "text"
    if kinds == {"bool"}:
        return "bool"
    inside = {kind.removeprefix("list of ") for kind in kinds if kind.startswith("list of ")}
    if len(inside) == len(kinds) and (inside <= NUMBERS or inside <= TEXTS):
        # A list in which every text is the name of a number may be one of texts.
        return "list of text" if "text" in inside else "list of int" if inside == {"int"} else "list of float"
    raise LockstepError(f"{lines}: the column {name!r} has values of several kinds: {', '.join(sorted(kinds))}.")


def _typed(row: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    return {_text(name): _as(value, kinds[name]) for name, value in row.items()}


def _as(value: Any, kind: str) -> Any:
    """A value as its column has it; an empty list is no value where the column has no list with anything in it."""
    _, is_list, inner = kind.rpartition("list of ")
    if isinstance(value, list):
        return [_as(each, inner) for each in value] if is_list else None
    return float(value) if value is not None and kind == "float" else _text(value)


def _text(value: Any) -> Any:
    """A text that UTF-8 can express: a lone surrogate of a model's becomes a question mark, as in its JSON lines."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"Parquet needs pyarrow, which cannot be imported ({error}). Install it on the leader with "
            "pip install 'jax-lockstep[parquet]', or do without Parquet (write_parquet: false)."
        ) from error
    return pyarrow, pyarrow.parquet
