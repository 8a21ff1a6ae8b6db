"""Every file that lockstep writes: no link is followed, and what replaces a file appears as a whole.

A directory that somebody hands over may have links, and a pipe, under the names that are written there. Workers have
this module without the package, with Python 3.8 or newer (`lockstep.launch.connection`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import traceback
from collections.abc import Iterator
from typing import BinaryIO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what writes meet: they name no file
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def advice_of(error: BaseException) -> str:
    """The change that mends a full disk or a place that may not be used, whose error needs no stack; else empty.

    TensorStore and others raise an error of their own with the system's words.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL or os.strerror(errno.ENOSPC) in "".join(
        traceback.format_exception_only(type(error), error)  # str() would run code of the error's own
    ):
        return "Free space there, or choose another place."
    if isinstance(error, OSError) and number in _FORBIDDEN and error.filename is not None:
        return "Choose a place that this user may read and write."
    return ""


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], mode: int = 0o666, fsync: bool = False) -> Iterator[BinaryIO]:
    """A context in which a file is written beside its place; it takes its place when the context ends without error.

    A file in the place, or a link to one, is replaced.

    Args:
        mode: The permissions, of which the umask takes some away.
        fsync: Whether the disk has the file before it takes its place.

    Raises:
        OSError: It cannot be written; a directory, pipe or device, or a link to the latter two, is not replaced.
    """
    place, draft = _places(path)
    try:
        with open(_opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, place)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            error.filename = place
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def check_file(path: str | os.PathLike[str]) -> None:
    """Find out before long work whether `new_file` can write its result; makes the directory that the file is in.

    Raises:
        OSError: It cannot.
    """
    place, draft = _places(path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    os.close(_opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    os.unlink(draft)


def _places(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The absolute path of a file, which is no directory, and that of a draft beside it."""
    place = os.path.abspath(os.fspath(path))
    if os.path.isdir(place) and not os.path.islink(place):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
    special = os.path.exists(place) and not (os.path.isfile(place) or os.path.isdir(place))
    if special or os.path.dirname(place) == "/dev":  # root would replace the machine's /dev/null, or /dev/stdout
        raise _refused(place)
    directory, name = os.path.split(place)
    return place, os.path.join(directory, f"{name[:100]}.{secrets.token_hex(8)}.tmp")


def write_file(path: str | os.PathLike[str], content: bytes | str, mode: int = 0o666, fsync: bool = False) -> None:
    """Write a file as `new_file` does; a text as UTF-8."""
    with new_file(path, mode, fsync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def in_place(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file to add to it or to change it, as the ``opener`` of `open`.

    Raises:
        OSError: It is a link, a pipe or a device.
    """
    return _opened(path, flags, 0o666)


def at_once(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file to read it, as the ``opener`` of `open`; a pipe that nobody writes to is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def private(path: str | os.PathLike[str], flags: int) -> int:
    """As `in_place`; a new file, and a directory that is made for it, can be read by its owner alone."""
    if flags & os.O_CREAT:
        os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
    return _opened(path, flags, 0o600)


def _opened(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    try:
        # A pipe that nobody reads would be waited for.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _refused(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(path)
    return descriptor


def _refused(path: str | os.PathLike[str]) -> OSError:
    text = "it is a link, a pipe or a device, and only regular files are written; choose another place"
    return OSError(errno.ELOOP, text, os.fspath(path))
