"""The files of a data source, wherever they are, and how they are cut into chunks that hosts share out."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lockstep.errors import ConfigError
from lockstep.urls import check_bare_name, url_to_fs

WHOLE_BYTES = 1 << 20
"""A file of at most this size is known by its content, a larger one by its ends and the time of its last change."""
END_BYTES = 64 << 10
MAX_LINE_BYTES = 64 << 20
"""Bytes of a JSON line where nothing else is said."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES, WANTED_CHUNKS = 4 << 20, 256 << 20, 64

_ETAGS = ("md5Hash", "blob_id", "checksum", "etag", "ETag")
"""What object stores call the digest of a file's content."""
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}

type Kind = Literal["jsonl", "text", "parquet", "arrow"]
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""How records are stored in files, by suffix; all others are text."""

type Piece = tuple[int, int, int]
"""A part of a file: the number of the file, the number of the part, and how many parts the file has."""
type Chunk = tuple[Piece, ...]
"""What one host reads as a whole: parts of one or several files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of training data.

    Args:
        fs: The file system (fsspec) that it is on.
        path: Its path there, as errors name it.
        size: Its size in bytes, compressed as it is.
        content: What its content is known by; equal for equal copies on several hosts.
        changed: When it was last changed, where ``content`` does not cover all of it; empty otherwise.
        kind: How records are stored in it.
        compression: fsspec's name of its compression; None for none, or one of the format's own.
    """

    fs: Any
    path: str
    size: int
    content: str
    changed: str
    kind: Kind
    compression: str | None

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
        if any(sign in path for sign in "*["):
            infos = {one: info for one, info in sorted(fs.glob(path, detail=True).items()) if info["type"] == "file"}
        elif fs.isdir(path):
            infos = {one: fs.info(one) for one in _dataset_files(fs, path.rstrip("/"), url, key)}
        else:
            infos = {path: fs.info(path)} if fs.exists(path) else {}
        files = [_file(fs, one, info) for one, info in infos.items()]
    except ConfigError:
        raise
    except Exception as error:  # each file system has its own errors: permissions, credentials, a missing package
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

    Args:
        files: The files of a source.

    Returns:
        The chunks, of half to one and a half of the size that is aimed at. Pieces in order are the files in order.
    """
    wanted = sum(file.size for file in files) // WANTED_CHUNKS
    chunk_bytes = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, wanted))
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
    kind: Kind = next((known for suffix, known in _KINDS.items() if name.endswith(suffix)), "text")
    return SourceFile(fs=fs, path=path, size=size, content=content, changed=changed, kind=kind, compression=compression)


def _fingerprint(fs: Any, path: str, info: Mapping[str, Any], size: int) -> tuple[str, str]:
    """What a file's content is known by, and where that does not cover all of it, when it was changed."""
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
        state = json.loads(fs.cat_file(f"{directory}/state.json"))
        names = [check_bare_name(file["filename"], f"{url}/state.json") for file in state["_data_files"]]
        return [f"{directory}/{name}" for name in names]
    if fs.exists(f"{directory}/dataset_dict.json"):
        splits = json.loads(fs.cat_file(f"{directory}/dataset_dict.json"))["splits"]
        raise ConfigError(
            f"{url} holds the splits {', '.join(splits)}. Name one in {key}, e.g. {url.rstrip('/')}/{splits[0]}."
        )
    raise ConfigError(
        f"{url} is a directory, but not one that Dataset.save_to_disk wrote. Name its files in {key}, e.g. "
        f"{url.rstrip('/')}/*.jsonl."
    )
