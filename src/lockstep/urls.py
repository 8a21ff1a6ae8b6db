"""The only file that opens URLs: which ones may be, and what a file that others wrote may name."""

import os
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from lockstep.credentials import without_credentials
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from etils import epath

PROTOCOLS: Final = ("file", "local", "memory", "gs", "gcs", "s3", "az", "abfs", "hf", "http", "https")
"""The schemes of URLs that are read. Other file systems of fsspec read what a URL names as instructions: ``reference``
renders its templates with jinja2, which runs code."""
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

    Raises:
        ConfigError: `check_url` refuses it.
        ImportError: The package for its protocol is not installed.
    """
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(check_url(url))
    return filesystem, path


def checkpoint_path(url: str) -> "epath.Path":
    """Return a path or URL as training checkpoints need it; a local path is made absolute.

    Raises:
        ConfigError: `check_url` refuses it, or it has another protocol than `CHECKPOINT_PROTOCOLS`.
    """
    from etils import epath

    protocol = _protocol(check_url(url))
    if protocol is None:
        return epath.Path(os.path.abspath(url))
    if protocol not in CHECKPOINT_PROTOCOLS:
        raise ConfigError(
            f"checkpoints cannot be at {without_credentials(str(url))!r}: give a local directory, or a URL of one of "
            f"{', '.join(CHECKPOINT_PROTOCOLS)}."
        )
    return epath.Path(url)


def open_http(request: urllib.request.Request, timeout_s: float) -> Any:
    """Return the reply to an HTTP request. No redirect is followed: its headers, a key among them, would go there too.

    Raises:
        urllib.error.HTTPError: The reply is an error or a redirect.
        OSError: There is no reply in time.
    """
    return urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s)


def check_bare_name(name: object, place: str) -> str:
    """Return the name of a file or directory beside the file that names it.

    Args:
        name: What the file says.

    Raises:
        ConfigError: It is no name, or the name of something elsewhere.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0") or "::" in name:
        raise ConfigError(f"{place} names {name!r}, which is not the name of a file beside it. Do not trust it.")
    return name


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _protocol(text: str) -> str | None:
    """The protocol of a path for fsspec; None for a local one."""
    from fsspec.core import split_protocol

    return split_protocol(text)[0]
