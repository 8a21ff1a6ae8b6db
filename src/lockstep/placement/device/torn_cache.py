"""Entries of JAX's compilation cache that a killed process left half written: found when they are read, and removed.

JAX writes an entry in place and never replaces one, so a torn one costs a warning and a compilation at every later
start.
"""

import contextlib
import importlib
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import jax

from lockstep.printable import get_logger

log = get_logger(__name__)

_MESSAGE: Final = "Error reading persistent compilation cache entry for"
"""The beginning of JAX's warning about an entry that it cannot read."""
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def torn_entries_removed(program: str) -> Iterator[None]:
    """Remove what is torn of a program where JAX warns inside that it cannot read an entry.

    Other warnings are shown as they would have been. The next process that compiles the program writes the entry anew.

    Args:
        program: The name of the module that is compiled inside, with which its entries begin.
    """
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=_MESSAGE)
            yield
    finally:
        for warning in caught:
            if str(warning.message).startswith(_MESSAGE) and (removed := remove_torn_entries(program)):
                log.warning(
                    "the compilation cache had half an entry of %s, as a process that is killed leaves it: compiled "
                    "again, and removed %s",
                    program,
                    ", ".join(map(str, removed)),
                )
            else:
                warnings.showwarning(
                    warning.message, warning.category, warning.filename, warning.lineno, warning.file, warning.line
                )


def remove_torn_entries(program: str) -> list[Path]:
    """Remove the entries of a program that end before their compressed data does; others stay, whatever they hold.

    Args:
        program: The name of the module.

    Returns:
        The files that were removed; none where the cache is not a local directory, or cannot be written.
    """
    directory = jax.config.jax_compilation_cache_dir
    if not directory or "://" in directory:
        return []
    removed = []
    for path in sorted(Path(directory).glob(f"{program}-*")):
        with contextlib.suppress(OSError):
            if path.is_file() and _is_torn(path.read_bytes()):
                path.unlink()
                removed.append(path)
    return removed


def _is_torn(entry: bytes) -> bool:
    """Whether compressed data breaks off. JAX uses zstandard where it is installed, else zlib."""
    if not entry.startswith(_ZSTD_MAGIC):
        reader = zlib.decompressobj()
        try:
            reader.decompress(entry)
        except zlib.error:
            return False  # another format
        return not reader.eof
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        return False
    reader = zstandard.ZstdDecompressor().decompressobj()
    try:
        reader.decompress(entry)
    except zstandard.ZstdError:
        return False  # damaged otherwise
    return not reader.eof
