"""Limits of what others wrote, whose sizes are looked at before it is read; and the reading of whole files."""

import os
import stat
from collections.abc import Sequence
from typing import Any, Final

from lockstep.errors import ConfigError, LockstepError

FILE_BYTES: Final = 64 << 20
"""The bytes of a file that is read whole; the index of the largest checkpoints has 10 MB."""
CONFIGURATION_BYTES: Final = 512 << 10
"""The bytes of a file of YAML: PyYAML reads 0.2 MB/s, and its faster parser dies of deep nesting."""
CONFIGURATION_VALUES: Final = 100_000
"""The values of a file of YAML, with those of aliases in each place."""
TOKENIZER_BYTES: Final = 512 << 20
"""The bytes of a file of a tokenizer; that of Gemma 3 has 33 MB."""
CHUNK_BYTES: Final = 64 << 20
"""The bytes of a chunk in which an array of a checkpoint is stored, before compression: what reading any part of it
costs. A chunk may also be as large as its array."""
HEADER_BYTES: Final = 100 << 20
"""The bytes of the header of a file of tensors, as safetensors itself has it."""
LINE_BYTES: Final = 64 << 20
"""The bytes of a line or row of training data where ``data.max_line_bytes`` does not say."""
PROMPT_LINE_BYTES: Final = 16 << 20
"""The bytes of a line or row of prompts where ``max_line_bytes`` does not say."""
TEMPLATE_BYTES: Final = 1 << 30
"""The bytes of memory of the process that renders chat templates."""
TEXT_BYTES: Final = 512 << 20
"""The bytes of a document of a file of texts, after decompression."""
REPLY_BYTES: Final = 1 << 20
"""The bytes of a server's reply."""
HOOK_BYTES: Final = 64 << 30
"""The bytes of the arrays that a checkpoint has of hooks: with the experts of 48 layers, 4,096 answers of 16,384 tokens
take 52 GB."""
LAYERS: Final = 10_000
"""The layers of a model, and the experts of one of them: a list is made of as many names as both together."""


def check_size(size: int | None, place: str, limit: int = FILE_BYTES, error: type[LockstepError] = ConfigError) -> None:
    """Refuse a file that is too large to be read whole.

    Raises:
        LockstepError: It has more bytes than the limit.
    """
    if size is not None and size > limit:
        raise error(f"{place} has {size:,} bytes; at most {limit:,} are read. It is not what its name says.")


def check_regular(path: str | os.PathLike[str], limit: int = FILE_BYTES) -> None:
    """Refuse a local file that a library is about to read, where that may have no end.

    Raises:
        ConfigError: It is a pipe or a device, or larger than the limit.
        OSError: It is not there.
    """
    _check(os.stat(path), os.fspath(path), limit)


def read_small(path: str | os.PathLike[str], limit: int = FILE_BYTES) -> bytes:
    """The content of a local file that somebody else may have made.

    Raises:
        ConfigError: It is a pipe or a device, which may have no end, or is larger than the limit.
        OSError: It cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check(status, os.fspath(path), limit)
    except BaseException:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        return file.read(min(limit, max(status.st_size, FILE_BYTES)))  # so many are allocated


def read_object(filesystem: Any, path: str, limit: int = FILE_BYTES) -> bytes:
    """The content of a file of an fsspec file system, as `read_small`.

    Raises:
        ConfigError: It is a pipe or a device, or is larger than the limit.
        Exception: The file system's own, where it cannot be read.
    """
    if _is_local(filesystem):
        return read_small(path, limit)
    check_size(filesystem.size(path), path, limit)
    data: bytes = filesystem.cat_file(path)
    return data


def read_objects(filesystem: Any, paths: Sequence[str], limit: int = FILE_BYTES) -> list[bytes]:
    """The contents of files of an fsspec file system, as `read_object`, asked for together."""
    if _is_local(filesystem):
        return [read_small(path, limit) for path in paths]
    count = len(paths)
    read: list[bytes] = filesystem.cat_ranges(paths, [0] * count, [limit + 1] * count, on_error="raise")
    for path, data in zip(paths, read, strict=True):
        check_size(len(data), path, limit)
    return read


def _is_local(filesystem: Any) -> bool:
    return "file" in (filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,))


def _check(status: os.stat_result, place: str, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{place} is a directory, a pipe or a device. It must be a regular file.")
    check_size(status.st_size, place, limit)
