"""Reading training files: local or remote, text or JSON lines, with the place of every record."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec

from lockstep.errors import ConfigError

Record = tuple[str, Mapping[str, Any]]
"""A training record: where it came from (``file:line``), and its fields."""


def read_records(urls: Sequence[str]) -> Iterator[Record]:
    """Read training records in the order of the files.

    Args:
        urls: Paths or URLs that fsspec knows (``gs://``, ``hf://``, …), wildcards allowed. ``.jsonl`` (also compressed,
            as in ``.jsonl.gz``) has one JSON object per line; any other file is one record with the field ``text``.

    Yields:
        The place and the fields of each record.

    Raises:
        ConfigError: There is no file, a file cannot be read, or a line is not a JSON object.
    """
    if not urls:
        raise ConfigError("data.train_urls is empty; at least 1 file is needed. List files, e.g. [data/train.jsonl].")
    for url in urls:
        try:
            files = fsspec.open_files(url, "rt", encoding="utf-8", compression="infer")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"training file {url} cannot be opened: {error}. Check data.train_urls.") from error
        if not files:
            raise ConfigError(f"training file {url} matches nothing. Check data.train_urls and the working directory.")
        for file in files:
            yield from _read_file(file)


def field(record: Record, name: str, kind: type = str) -> Any:
    """Return one field of a record.

    Args:
        record: A record that `read_records` yielded.
        name: The name of the field.
        kind: The type that its value must have.

    Raises:
        ConfigError: The field is missing or has another type.
    """
    place, values = record
    if name not in values:
        raise ConfigError(
            f"{place} has no field {name!r}; it has {sorted(values)}. Set data.format to what the file is."
        )
    if not isinstance(values[name], kind):
        raise ConfigError(f"{place}: field {name!r} is {values[name]!r}, which is not a {kind.__name__}. Correct it.")
    return values[name]


def _read_file(file: fsspec.core.OpenFile) -> Iterator[Record]:
    try:
        with file as lines:
            if ".jsonl" not in file.path:
                yield file.path, {"text": lines.read()}
                return
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file.path}:{number}", _parse(f"{file.path}:{number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"training file {file.path} cannot be read: {error}. Check data.train_urls.") from error


def _parse(place: str, line: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} is not JSON: {error}. Correct the line or remove it.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{place} is a JSON {type(values).__name__}, not an object. Write one object per line.")
    return values
