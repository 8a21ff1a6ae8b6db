"""Files of prompts: their lines or rows, one by one, each with its place."""

import codecs
import csv
import io
import itertools
from collections.abc import Iterator
from typing import Any, Final

from lockstep.errors import HostTimeoutError, PromptError
from lockstep.json_text import not_utf8, parse_json
from lockstep.text.arrow_rows import parquet_rows
from lockstep.urls import url_to_fs

TABLES: Final = (".csv", ".tsv")
PROMPT_FILES: Final = (".txt", ".jsonl", ".ndjson", ".jsonlines", *TABLES, ".parquet")
"""Ends of the names of files of prompts: a prompt per line, a JSON object per line, or a prompt per row."""
_FIX: Final = 'Write one object per line, such as {"prompt": "…", "answer": "…"}.'


def prompt_items(path: str, max_line_bytes: int) -> Iterator[tuple[str, object]]:
    """Yield the lines or rows of a file of prompts, each after its place.

    Raises:
        PromptError: The file cannot be read, or is of another kind.
    """
    if not path.endswith(PROMPT_FILES):
        raise PromptError(
            f"prompts is the text {path!r}, which is taken as a file and must end in .txt (a prompt per line) or "
            f"{', '.join(PROMPT_FILES[1:])}. For a prompt in the config itself, write a list: prompts: ['…']."
        )
    if path.endswith(".parquet"):
        yield from _read_parquet(path, max_line_bytes)
        return
    if path.endswith(TABLES):
        yield from _read_table(path, max_line_bytes)
        return
    for number, line in enumerate(_read_lines(path, max_line_bytes), start=1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        if path.endswith(".txt"):
            yield place, line
            continue
        yield place, parse_json(line, place, object, _FIX, PromptError, unique=True)


def _read_table(path: str, max_line_bytes: int) -> Iterator[tuple[str, object]]:
    """The rows of a file of values with separators, whose first row has their names."""
    lines = (f"{line}\n" for line in _read_lines(path, max_line_bytes))
    csv.field_size_limit(max(csv.field_size_limit(), max_line_bytes))
    reader = csv.DictReader(lines, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
    try:
        names = reader.fieldnames or ()
        if twice := {name for name in names if names.count(name) > 1}:
            raise PromptError(f"{path}:1 has the name {min(twice)!r} twice. Rename or remove one of the columns.")
        for row in reader:
            if None in row or None in row.values():
                raise PromptError(
                    f"{path}:{reader.line_num} has another number of values than the first line has names, "
                    f"{len(reader.fieldnames or ())}. Correct it, or quote values with separators in them."
                )
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise PromptError(f"{path}:{reader.line_num} is not CSV: {error}. Correct it.") from None


def _read_parquet(path: str, max_bytes: int) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow.parquet

        filesystem, opened = url_to_fs(path)
        with filesystem.open(opened, "rb") as stream, pyarrow.parquet.ParquetFile(stream) as table:
            groups = range(table.num_row_groups)
            for number, row in enumerate(parquet_rows(table, stream, groups, None, max_bytes), start=1):
                if row is None:
                    raise _too_long(f"{path}:{number}", max_bytes, "row")
                yield f"{path}:{number}", _as_json(row, f"{path}:{number}")
    except ImportError as error:
        raise PromptError(
            f"prompt file {path!r} needs pyarrow, which cannot be imported ({error}). Install it with "
            "pip install 'jax-lockstep[parquet]'."
        ) from error
    except (PromptError, HostTimeoutError):
        raise
    except Exception as error:  # each file system has its own errors
        raise PromptError(f"prompt file {path!r} could not be read ({type(error).__name__}: {error}).") from error


def _as_json(value: Any, place: str, column: str = "") -> Any:
    """A value of a table as rows of samples can have it: times and decimals become texts.

    Raises:
        PromptError: It has bytes.
    """
    if isinstance(value, dict):
        return {key: _as_json(inner, place, column or key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, place, column) for item in value]
    if isinstance(value, bytes):
        raise PromptError(f"{place} has bytes in {column!r}, which rows of samples cannot have. Remove the column.")
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _read_lines(path: str, max_line_bytes: int) -> Iterator[str]:
    try:
        filesystem, opened = url_to_fs(path)
        with filesystem.open(opened, "rb") as raw:
            file = raw if hasattr(raw, "peek") else io.BufferedReader(raw)
            for number in itertools.count(1):
                line = file.readline(max_line_bytes + 1)
                if not line:
                    return
                if len(line) > max_line_bytes:
                    raise _too_long(f"{path}:{number}", max_line_bytes, "line")
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield _decoded(text, f"{path}:{number}").rstrip("\r\n")
    except (PromptError, HostTimeoutError):
        raise
    except FileNotFoundError:
        raise PromptError(
            f"prompt file {path!r} does not exist. Fix the path; relative paths start at the working directory."
        ) from None
    except Exception as error:  # each file system has its own errors (permissions, credentials, missing package)
        raise PromptError(f"prompt file {path!r} could not be read ({type(error).__name__}: {error}).") from error


def _too_long(place: str, max_bytes: int, item: str) -> PromptError:
    return PromptError(f"{place} has more than {max_bytes:,} bytes (max_line_bytes). Raise that, or cut the {item}.")


def _decoded(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{place} {not_utf8(error)}. Convert the file.") from None
