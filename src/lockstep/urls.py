"""The only file that opens URLs: which ones may be, and what a file that others wrote may name."""

import contextlib
import glob
import http.client
import io
import os
import re
import socket
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

from lockstep.errors import ConfigError, LockstepError
from lockstep.json_text import lone_surrogate
from lockstep.limits import REPLY_BYTES
from lockstep.printable import without_credentials
from lockstep.storage import RemoteFiles, unreachable

if TYPE_CHECKING:
    from etils import epath

PLACEHOLDER: Final = "YOUR_BUCKET"  # the name of a bucket in configurations as they are shipped
PROTOCOLS: Final = ("file", "local", "memory", "gs", "gcs", "s3", "az", "abfs", "hf", "http", "https")
"""The schemes of URLs that are read. Other file systems of fsspec read what a URL names as instructions: ``reference``
renders its templates with jinja2, which runs code."""
_WILDCARDS: Final = frozenset("*?[")
CHECKPOINT_PROTOCOLS: Final = ("gs", "s3", "az", "hf")
"""Those of them that a training checkpoint may be at; ``etils.epath`` takes any other for a local path."""


def check_url(url: str | os.PathLike[str]) -> str:
    """Return a path or URL as a text, if it may be opened.

    Raises:
        ConfigError: It is a chain of file systems, or has another protocol than `PROTOCOLS`.

    Example:
        >>> from lockstep.urls import check_url
        >>> check_url("gs://bucket/prompts.jsonl")
        'gs://bucket/prompts.jsonl'
    """
    text = os.fspath(url)
    shown = without_credentials(text)
    if "::" in text:
        raise ConfigError(f"{shown!r} is a chain of file systems (::), which is not opened. Give the URL of the file.")
    protocol = _protocol(text)
    if protocol is not None and protocol not in PROTOCOLS:
        raise ConfigError(
            f"{shown!r} has the protocol {protocol!r}; a URL must have one of {', '.join(PROTOCOLS)}. Copy the files "
            "to a directory or a bucket."
        )
    return text


def url_to_fs(url: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path in it.

    Reads of one that is not of this machine are waited for (`lockstep.storage.RemoteFiles`).

    Raises:
        ConfigError: `check_url` refuses it, or it has the `PLACEHOLDER` of a bucket, or is a pipe, or the package for
            its protocol is not installed.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    text = check_url(url)
    if PLACEHOLDER in text:  # the bucket's client would ask for credentials for a minute first
        raise ConfigError(
            f"{without_credentials(text)!r} has {PLACEHOLDER} of a shipped configuration in it. Put the name of your "
            "bucket there."
        )
    try:
        filesystem, path = fsspec.core.url_to_fs(text)
    except Exception as error:
        if (refusal := unreachable(without_credentials(text), error)) is not None:
            raise refusal from error
        raise
    if isinstance(filesystem, LocalFileSystem) and os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise ConfigError(f"{text!r} is a pipe, and is read more than once: it must be a file. Write a file first.")
    is_own = isinstance(filesystem, LocalFileSystem | MemoryFileSystem)
    return filesystem if is_own else RemoteFiles(filesystem), path


def files_of(filesystem: Any, path: str) -> dict[str, Any]:
    """Return what a file system says of each file or directory that a path with wildcards matches, links followed.

    A name of a file may have the signs of wildcards in it, and so may the directory that a pattern is in.

    Args:
        filesystem: The file system of `url_to_fs`, which has the path.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # for `exists`, what fails is not there
        return {path: filesystem.info(path)}
    if not set(path) & _WILDCARDS:
        return {}
    directory = path.rpartition("/")[0]
    while set(directory) & _WILDCARDS and not filesystem.isdir(directory):
        directory = directory.rpartition("/")[0]
    listed = filesystem.glob(glob.escape(directory) + path[len(directory) :], detail=True)
    return {name: filesystem.info(name) if info.get("islink") else info for name, info in sorted(listed.items())}


def checkpoint_path(url: str) -> "epath.Path":
    """Return a path or URL as training checkpoints need it; a local path is made absolute.

    Raises:
        ConfigError: `check_url` refuses it, or it has another protocol than `CHECKPOINT_PROTOCOLS`.
    """
    from etils import epath

    protocol = _protocol(check_url(url))
    if protocol is None:
        path = os.path.abspath(url)
        if lone_surrogate(path):  # a byte that is no UTF-8, for Python; tensorstore has no such names
            raise ConfigError(f"checkpoints cannot be at {path!r}, whose name is not UTF-8. Rename the directory.")
        return epath.Path(path)
    if protocol not in CHECKPOINT_PROTOCOLS:
        raise ConfigError(
            f"checkpoints cannot be at {without_credentials(str(url))!r}: give a local directory, or a URL of one of "
            f"{', '.join(CHECKPOINT_PROTOCOLS)}."
        )
    return epath.Path(url)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a local path so that it names the same file whatever becomes the working directory; a URL as it is."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def read_http(request: urllib.request.Request, timeout_s: float) -> bytes:
    """Return the reply to an HTTP request. No redirect is followed: its headers, a key among them, would go there too.

    Args:
        timeout_s: The seconds in which all of it has to be there, its headers and trailers too; the connection is
            closed then.

    Raises:
        urllib.error.HTTPError: The reply is an error or a redirect, whose text it has.
        TimeoutError: The reply is not complete in time.
        OSError: There is no reply, or half of one.
        LockstepError: It is longer than `REPLY_BYTES`.
    """
    with _Deadline(timeout_s) as deadline:
        opener = urllib.request.build_opener(_NoRedirect, _Handler(deadline))
        try:
            with opener.open(request, timeout=timeout_s) as response:
                received: bytes = response.read(REPLY_BYTES + 1)
                if len(received) <= REPLY_BYTES and response.length:
                    raise ConnectionError("the reply ended too early")
        except urllib.error.HTTPError as error:
            text = io.BytesIO(error.read(REPLY_BYTES))
            raise urllib.error.HTTPError(error.url, error.code, error.reason, error.headers, text) from None
        except http.client.HTTPException as error:
            raise ConnectionError(f"the reply is not complete, or not HTTP ({type(error).__name__})") from None
    if len(received) > REPLY_BYTES:
        raise LockstepError(f"the reply is longer than {REPLY_BYTES} bytes")
    return received


def check_bare_name(name: object, place: str) -> str:
    """Return the name of a file or directory beside the file that names it.

    Raises:
        ConfigError: It is no name, or the name of something elsewhere.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0") or "::" in name:
        raise ConfigError(f"{place} names {name!r}, which is not the name of a file beside it. Do not trust it.")
    return name


def check_links(directory: str | os.PathLike[str]) -> None:
    """Refuse a directory that is written to where it has links that lead out of it: it may be somebody else's.

    The logs of W&B's runs are left out: it puts links to its own cache there, and writes to none of an earlier run.

    Raises:
        ConfigError: It has one, at any depth.
    """
    root = os.path.realpath(directory)
    for folder, directories, files in os.walk(root):
        if re.fullmatch(r"wandb/(offline-)?run-[^/]+/logs", os.path.relpath(folder, root)):
            continue
        for path in (os.path.join(folder, name) for name in (*directories, *files)):
            if os.path.islink(path) and os.path.commonpath([root, os.path.realpath(path)]) != root:
                raise ConfigError(
                    f"{path} is a link that leads out of {root} (to {os.readlink(path)!r}), where files are about to "
                    "be written. Remove the link, or name the place that it leads to in the configuration."
                )


class _Deadline:
    """A context in which HTTP connections end at a time, wherever their reading waits: the time-out of a socket begins
    anew with each byte, and a server may send headers without end.

    Raises:
        TimeoutError: The block has not ended by then.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._over, self._lock = timeout_s, False, threading.Lock()
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def connection(self, kind: type[http.client.HTTPConnection]) -> Callable[..., http.client.HTTPConnection]:
        """Return a function that makes a connection of a kind."""

        def make(*args: Any, **options: Any) -> http.client.HTTPConnection:
            connection = kind(*args, **options)
            vars(connection)["_create_connection"] = self._connect  # what http.client calls for its socket
            return connection

        return make

    def _connect(self, *args: Any) -> socket.socket:
        connected = socket.create_connection(*args)
        with self._lock:
            if self._over:
                connected.close()
                raise TimeoutError
            self._sockets.append(connected.dup())  # TLS takes the first one over
        return connected

    def _end(self) -> None:
        with self._lock:
            self._over = True
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, stack: object) -> None:
        self._timer.cancel()
        with self._lock:
            for connection in self._sockets:
                connection.close()
            # What it has read may be half of a reply that seems to have ended.
            if self._over and (error is None or isinstance(error, Exception)):
                raise TimeoutError(f"the reply was not complete after {self._timeout_s:g} s") from None


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._deadline.connection(http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._deadline.connection(http.client.HTTPSConnection), request)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _protocol(text: str) -> str | None:
    """The protocol of a path for fsspec; None for a local one."""
    from fsspec.core import split_protocol

    return split_protocol(text)[0]
