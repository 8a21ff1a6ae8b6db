"""The files of a data source in chunks that hosts share out, and their records by number, or what is wrong there."""

import codecs
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

import fsspec

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError, HostTimeoutError
from lockstep.json_text import lone_surrogate, not_utf8, parse_json, pointer_text
from lockstep.limits import LINE_BYTES, TEXT_BYTES, read_object
from lockstep.text.arrow_rows import batch_rows, parquet_rows
from lockstep.training.data.zstd_stream import ZstdStream
from lockstep.urls import check_bare_name, files_of, url_to_fs

WHOLE_BYTES = 1 << 20
"""A file of at most this size is known by its content, a larger one by its ends and the time of its last change."""
END_BYTES = 64 << 10
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES, WANTED_CHUNKS = 4 << 20, 256 << 20, 64

_ETAGS = ("md5Hash", "blob_id", "checksum", "etag", "ETag")
"""The names that object stores have for the digest of a file's content."""
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}

type Kind = Literal["jsonl", "text", "parquet", "arrow"]
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".jsonlines": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Formats of files of records, by suffix; all others are text."""

type Piece = tuple[int, int, int]
"""A part of a file: the number of the file, the number of the part, and how many parts the file has."""
type Chunk = tuple[Piece, ...]
"""A unit of reading for one host: parts of one or several files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A source of a mixture, or of the validation data."""

    url: FilePath
    """Its file or files: a path or URL that fsspec knows, wildcards allowed, or a directory of ``save_to_disk``."""
    weight: float | None = None
    """The share of a batch that comes from it, relative to the weights of the others; null: 1."""
    name: str | None = None
    """Its name in metrics and messages; null: the name of the file without its suffix, or of the
    directory where the file has wildcards."""

    def __post_init__(self) -> None:
        check_fields(self, "data.train_urls: ")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ConfigError(f"the weight of source {self.url} is {self.weight}; it must be above 0. Change it.")

    @property
    def label(self) -> str:
        """The name in metrics and messages."""
        path = PurePosixPath(self.url.rstrip("/"))
        stem = path.name.split(".")[0]
        return self.name or (path.parent.name if "*" in stem or "[" in stem else stem) or self.url


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of training data."""

    fs: Any  # the file system (fsspec) that it is on
    path: str
    size: int
    content: str  # what its content is known by; equal for equal copies on several hosts
    changed: str  # when it was last changed, where `content` does not cover all of it; empty otherwise
    kind: Kind  # how records are stored in it
    compression: str | None  # fsspec's name of its compression; None for none, or one of the format's own

    @property
    def splits(self) -> bool:
        """Whether a part of it can be read without what is before."""
        return self.compression is None and self.kind != "arrow"


def list_files(url: str, key: str) -> list[SourceFile]:
    """Find the files that a URL names.

    Args:
        url: A path or URL that fsspec knows, wildcards allowed, or a directory that ``Dataset.save_to_disk`` wrote.
        key: The configuration key that has it, for errors.

    Returns:
        The files in the order of their paths, those of a data set in its own order.

    Raises:
        ConfigError: There is none, or it cannot be looked at.
    """
    try:
        fs, path = url_to_fs(url)
        infos = files_of(fs, path)
        if path in infos and fs.isdir(path):
            infos = {name: fs.info(name) for name in _dataset_files(fs, path.rstrip("/"), url, key)}
        if pipes := [name for name, info in infos.items() if info["type"] == "other"]:
            raise ConfigError(f"training file {pipes[0]} is a pipe or a device: it must be a file. Check {key}.")
        files = [_file(fs, name, info) for name, info in infos.items() if info["type"] != "directory"]
    except (ConfigError, HostTimeoutError):
        raise
    except Exception as error:  # each file system has its own errors
        raise ConfigError(
            f"training file {url} cannot be opened: {type(error).__name__}: {error}. Check {key}."
        ) from error
    if not files:
        raise ConfigError(f"training file {url} matches nothing. Check {key} and the working directory.")
    return files


def make_chunks(files: Sequence[SourceFile]) -> tuple[Chunk, ...]:
    """Cut files into chunks of about equal size, which depend on the files alone, never on the number of hosts.

    A compressed file and an Arrow file are read as a whole; others in parts: JSON lines and text at line ends, Parquet
    at row groups.
    """
    even_bytes = sum(file.size for file in files) // WANTED_CHUNKS
    chunk_bytes = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, even_bytes))
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    size = 0.0
    for number, file in enumerate(files):
        parts = max(1, -(-file.size // chunk_bytes)) if file.splits else 1
        for part in range(parts):
            pieces.append((number, part, parts))
            size += file.size / parts
            if size >= chunk_bytes / 2:
                chunks.append(tuple(pieces))
                pieces, size = [], 0.0
    return (*chunks, tuple(pieces)) if pieces else tuple(chunks)


def _file(fs: Any, path: str, info: Mapping[str, Any]) -> SourceFile:
    size = int(info["size"] or 0)
    content, changed = _fingerprint(fs, path, info, size)
    name, compression = path.lower(), None
    for suffix, codec in _COMPRESSIONS.items():
        if name.endswith(suffix):
            name, compression = name.removesuffix(suffix), codec
    if name.endswith((".csv", ".tsv", ".xlsx")):
        raise ConfigError(
            f"training file {path} is a table, which is not read as data, and would be one document. Write it as JSON "
            "lines or Parquet, e.g. pandas.read_csv(…).to_parquet(…)."
        )
    kind: Kind = next((known for suffix, known in _KINDS.items() if name.endswith(suffix)), "text")
    return SourceFile(fs=fs, path=path, size=size, content=content, changed=changed, kind=kind, compression=compression)


def _fingerprint(fs: Any, path: str, info: Mapping[str, Any], size: int) -> tuple[str, str]:
    """The fingerprint of a file's content, and where that does not cover all of it, when it was changed."""
    for name in _ETAGS:
        if info.get(name):
            return f"{name} {info[name]}", ""
    if size <= WHOLE_BYTES:
        return hashlib.sha256(fs.cat_file(path)).hexdigest(), ""
    ends = fs.cat_file(path, 0, END_BYTES) + fs.cat_file(path, size - END_BYTES, size)
    return hashlib.sha256(ends).hexdigest(), str(next((info[name] for name in _TIMES if info.get(name)), ""))


def _dataset_files(fs: Any, directory: str, url: str, key: str) -> list[str]:
    """The Arrow files of a directory that ``Dataset.save_to_disk`` wrote."""
    if fs.exists(f"{directory}/state.json"):
        state = json.loads(read_object(fs, f"{directory}/state.json"))
        names = [check_bare_name(file["filename"], f"{url}/state.json") for file in state["_data_files"]]
        return [f"{directory}/{name}" for name in names]
    if fs.exists(f"{directory}/dataset_dict.json"):
        splits = json.loads(read_object(fs, f"{directory}/dataset_dict.json"))["splits"]
        raise ConfigError(
            f"{url} holds the splits {', '.join(splits)}. Name one in {key}, e.g. {url.rstrip('/')}/{splits[0]}."
        )
    raise ConfigError(
        f"{url} is a directory, but not one that Dataset.save_to_disk wrote. Name its files in {key}, e.g. "
        f"{url.rstrip('/')}/*.jsonl."
    )


BUFFER_BYTES = 1 << 20

type Record = Mapping[str, Any]
"""The fields of a training record by name."""


_NAMES = {str: "a text", list: "a list of messages", bool: "true or false", int: "a number", float: "a number"}


class BadRow(Exception):
    """A record that cannot be trained on; the text goes on after its place, as in ``file:line is not JSON``."""


type _Records = Iterator[tuple[int, int, Record | BadRow | None]]


def read_piece(
    file: SourceFile, part: int, parts: int, fields: Sequence[str], max_line_bytes: int = LINE_BYTES
) -> _Records:
    """Read the records of a part of a file.

    JSON lines have an object per line. A text file, or each part of one, is a record with the field ``text``. Parts
    begin and end at line ends, those of a Parquet file at row groups.

    Args:
        fields: The fields that are needed, in formats that can leave out the others.

    Yields:
        The 1-based number of the line (or row) within this part, the share of the part that was read so far in bytes
        of the file, and the record, or what is wrong with it, also where a whole file has none; None for an empty line.

    Raises:
        ConfigError: The file cannot be read.
    """
    empty = parts == 1
    readers: Mapping[Kind, Callable[[], _Records]] = {
        "jsonl": lambda: _read_jsonl(file, part, parts, max_line_bytes),
        "text": lambda: _read_text(file, part, parts),
        "arrow": lambda: _read_arrow(file, max_line_bytes),
        "parquet": lambda: _read_parquet(file, part, parts, fields, max_line_bytes),
    }
    try:
        for number, position, record in readers[file.kind]():
            empty = empty and record is None
            yield number, position, record
        if empty:
            yield 0, file.size, BadRow("has no records. Write it again, or take it out of the data.")
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"training file {file.path} needs a package that is not installed: {error}. Install "
            "'jax-lockstep[parquet]' for Parquet and Arrow."
        ) from error
    except Exception as error:  # each file system and each decompressor has its own errors
        raise ConfigError(
            f"training file {file.path} cannot be read: {type(error).__name__}: {error}. Check the file, or take it "
            "out of the data."
        ) from error


def lines_before(file: SourceFile, part: int, parts: int) -> int:
    """Count the lines (or rows) of a file before one of its parts, by reading it up to there."""
    if file.kind == "parquet":
        import pyarrow.parquet

        with file.fs.open(file.path, "rb") as stream, pyarrow.parquet.ParquetFile(stream) as table:
            groups = range(part * table.num_row_groups // parts)
            return sum(table.metadata.row_group(group).num_rows for group in groups)
    return sum(1 for before in range(part) for _ in _lines(file, before, parts, BUFFER_BYTES))


def field(record: Record, name: str, kind: type | tuple[type, ...] = str) -> Any:
    """Return one field of a record."""
    if name not in record:
        raise BadRow(f"has no field {name!r}; it has {sorted(record)}. Set data.format to what the file is.")
    if not isinstance(record[name], kind):
        kinds = " or ".join(dict.fromkeys(_NAMES[type_] for type_ in (kind if isinstance(kind, tuple) else (kind,))))
        raise BadRow(
            f"has {record[name]!r:.200} as {name!r}; it must be {kinds}. Correct it, or set data.format to what the "
            "file is."
        )
    if isinstance(record[name], str) and (broken := lone_surrogate(record[name])):
        raise BadRow(f"has {broken} in {name!r}. Correct it.")
    return record[name]


@contextlib.contextmanager
def _opened(file: SourceFile) -> Iterator[Any]:
    """A file as a stream of what is compressed in it."""
    codec = file.compression if file.compression != "zstd" else None
    with file.fs.open(file.path, "rb", compression=codec) as stream:
        yield io.BufferedReader(ZstdStream(stream), BUFFER_BYTES) if file.compression == "zstd" else stream


def _lines(file: SourceFile, part: int, parts: int, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a part, each with the bytes that were read with it.

    A line longer than ``max_bytes`` comes cut to one byte more than that; the rest is passed over piece by piece.
    """
    begin, end = (part * file.size // parts, (part + 1) * file.size // parts)
    with _opened(file) as raw:
        # Without a buffer of their own, these read a whole block for each line.
        unbuffered = isinstance(raw, fsspec.spec.AbstractBufferedFile | io.RawIOBase)
        stream = io.BufferedReader(raw, BUFFER_BYTES) if unbuffered else raw
        if begin:
            stream.seek(begin - 1)
            begin += _pass_line(stream) - 1
        while (parts == 1 or begin < end) and (line := stream.readline(-1 if max_bytes is None else max_bytes + 1)):
            begin += len(line)
            if max_bytes is not None and len(line) > max_bytes and not line.endswith(b"\n"):
                begin += _pass_line(stream)
            yield begin, line


def _pass_line(stream: Any) -> int:
    """Read on to the end of a line; return how many bytes that were."""
    size = 0
    while piece := stream.readline(BUFFER_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def _read_jsonl(file: SourceFile, part: int, parts: int, max_bytes: int) -> _Records:
    begin = part * file.size // parts
    for number, (position, line) in enumerate(_lines(file, part, parts, max_bytes), start=1):
        yield number, position - begin, _parse(line, max_bytes) if line.strip() else None


def _parse(line: bytes, max_bytes: int) -> Record | BadRow:
    if len(line) > max_bytes:
        return _too_long(max_bytes)
    try:
        return parse_json(line, "it", dict, "Write one object per line, in UTF-8.", unique=True)
    except ConfigError as error:
        return BadRow(str(error).removeprefix("it "))


def _too_long(max_bytes: int) -> BadRow:
    return BadRow(f"has more than {max_bytes:,} bytes (data.max_line_bytes). Raise that, or remove the line.")


def _read_text(file: SourceFile, part: int, parts: int) -> _Records:
    text = bytearray()  # a list of empty lines would take forty times as much
    for _, line in _lines(file, part, parts, TEXT_BYTES):
        text += line
        if len(text) > TEXT_BYTES:
            yield 0, len(text), BadRow(f"has more than {TEXT_BYTES:,} bytes of text. Cut it into several files.")
            return
    if not text:
        return  # a line that begins before this part holds all of it
    size = len(text)
    if part == 0 and text.startswith(codecs.BOM_UTF8):
        del text[: len(codecs.BOM_UTF8)]
    yield 0, size, _document(text)


def _document(text: bytearray) -> Record | BadRow:
    """The record of a text file, or what else it is than a text."""
    if pointer := pointer_text(text):
        return BadRow(pointer)
    if b"\0" in text:
        return BadRow("has bytes of 0, as archives such as .tar have, and no text. Unpack or convert it.")
    with contextlib.suppress(ValueError, RecursionError):
        if text.startswith(b"{") and isinstance(json.loads(text[: text.find(b"\n") % (len(text) + 1)]), dict):
            return BadRow(
                "has a JSON object in its first line, and its name does not say so: it would be one document. Let it "
                "end in .jsonl (also .jsonl.gz, .jsonl.zst), or make it a record with the field 'text'."
            )
    try:
        return {"text": text.decode("utf-8")}
    except UnicodeDecodeError as error:
        return BadRow(f"{not_utf8(error)}. Convert the file or remove it.")


def _read_parquet(file: SourceFile, part: int, parts: int, fields: Sequence[str], max_bytes: int) -> _Records:
    import pyarrow.parquet

    with file.fs.open(file.path, "rb") as stream, pyarrow.parquet.ParquetFile(stream) as table:
        groups = range(part * table.num_row_groups // parts, (part + 1) * table.num_row_groups // parts)
        columns = [name for name in fields if name in table.schema_arrow.names] or None
        total = sum(table.metadata.row_group(group).num_rows for group in groups)
        rows = parquet_rows(table, stream, groups, columns, max_bytes)
        yield from _numbered(rows, max_bytes, lambda number: file.size * number // (total * parts))


def _read_arrow(file: SourceFile, max_bytes: int) -> _Records:
    import pyarrow.ipc

    with _opened(file) as stream:
        head = stream.read(6)
        stream.seek(0)
        if head == b"ARROW1":
            table = pyarrow.ipc.open_file(stream)
            batches: Any = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(stream)
        rows = itertools.chain.from_iterable(batch_rows(batch, max_bytes) for batch in batches)
        yield from _numbered(rows, max_bytes, lambda _: stream.tell())


def _numbered(rows: Iterator[Record | None], max_bytes: int, position: Callable[[int], int]) -> _Records:
    for number, row in enumerate(rows, start=1):
        yield number, position(number), _too_long(max_bytes) if row is None else row
