"""The directory or the bucket that a checkpoint is saved to: what is there counts only when it is complete."""

import abc
import contextlib
import glob
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fsspec.implementations.local import LocalFileSystem

from lockstep.errors import ConfigError
from lockstep.files import new_file
from lockstep.hosts import LEASE
from lockstep.models.hf.files import INDEX_NAME, SINGLE_NAME
from lockstep.urls import url_to_fs

CONFIG_NAME = "config.json"
"""The file without which nobody takes a directory for a checkpoint; in a bucket it is written last."""

_WEIGHTS = re.compile(rf"{re.escape(SINGLE_NAME)}|model-\d+-of-\d+\.safetensors|{re.escape(INDEX_NAME)}")


class Writable(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, data: Any, /) -> Any:
        """Write bytes."""


class SaveTarget(abc.ABC):
    """The target of a saved checkpoint. The leader begins and ends; every process that sees it may write files.

    Args:
        token: A name for this save that no other has, the same on every process.
    """

    def __init__(self, token: str) -> None:
        self.token = token

    @property
    @abc.abstractmethod
    def lease(self) -> str:
        """The path or URL of the file that says which job saves here."""

    @abc.abstractmethod
    def check(self) -> None:
        """On one process, before the work whose result is saved: write to the place, and leave it as it was.

        Raises:
            ConfigError: Something is there that is not a checkpoint.
            OSError: It cannot be written.
        """

    @abc.abstractmethod
    def begin(self) -> None:
        """On the leader: make the place.

        Raises:
            ConfigError: Something is there that is not a checkpoint.
            OSError: It cannot be made.
        """

    @abc.abstractmethod
    def seen(self) -> bool:
        """Return whether this process sees what `begin` made on the leader."""

    @abc.abstractmethod
    def create(self, name: str) -> contextlib.AbstractContextManager[Writable]:
        """Return a context in which a file is written; it is complete when the context ends without an error."""

    @abc.abstractmethod
    def write_small(self, write: Callable[[str], None]) -> None:
        """On the leader: write the small files.

        Args:
            write: Writes them to a local directory, whose path it is given.
        """

    @abc.abstractmethod
    def commit(self) -> None:
        """On the leader: make a checkpoint of what has been written, in the place of one that was there."""

    @abc.abstractmethod
    def abort(self) -> None:
        """On the leader: remove what has been written, as far as that is possible."""


class LocalTarget(SaveTarget):
    """A directory: files are written beside it, under a name that begins with a dot, and it is renamed at the end.

    Files of other names stay as they are.
    """

    def __init__(self, path: str, token: str) -> None:
        super().__init__(token)
        self._path = pathlib.Path(path).expanduser().absolute()
        self._draft = self._path.with_name(f".{self._path.name}.tmp-{token}")

    @property
    def lease(self) -> str:
        # Beside the directory, which another one takes the place of.
        return os.fspath(self._path.with_name(f".{self._path.name}.{LEASE}"))

    def check(self) -> None:
        if self._path.exists() and not self._path.is_dir():
            raise ConfigError(f"{self._path} is a file; a checkpoint is a directory. Choose another path.")
        if self._path.is_dir() and any(self._path.iterdir()) and not (self._path / CONFIG_NAME).is_file():
            raise ConfigError(
                f"{self._path} is there and is not a checkpoint (no {CONFIG_NAME}); saving would replace it. "
                "Choose another path, or remove it yourself."
            )
        self._draft.mkdir(parents=True)
        self._draft.rmdir()

    def begin(self) -> None:
        for replaced in self._siblings("old"):  # by a process that was killed
            if not self._path.exists():
                replaced.rename(self._path)
        self.check()
        self._remove_siblings("tmp")  # of processes that were killed
        self._draft.mkdir()

    def seen(self) -> bool:
        return self._draft.is_dir()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Writable]:
        with new_file(self._draft / name, fsync=True) as file:
            yield file

    def write_small(self, write: Callable[[str], None]) -> None:
        write(os.fspath(self._draft))

    def commit(self) -> None:
        if self._path.exists():
            self._keep_others()
            self._path.rename(self._path.with_name(f".{self._path.name}.old-{self.token}"))
        self._draft.rename(self._path)
        self._remove_siblings("old")

    def abort(self) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)

    def _keep_others(self) -> None:
        """Have what is no part of a checkpoint in the one that takes its place: it is somebody else's."""
        for path in self._path.iterdir():
            kept = self._draft / path.name
            if path.name == CONFIG_NAME or _WEIGHTS.fullmatch(path.name) or os.path.lexists(kept):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, kept, symlinks=True)
            else:
                shutil.copy2(path, kept, follow_symlinks=False)

    def _siblings(self, kind: str) -> list[pathlib.Path]:
        return sorted(self._path.parent.glob(f".{glob.escape(self._path.name)}.{kind}-*"))

    def _remove_siblings(self, kind: str) -> None:
        for sibling in self._siblings(kind):
            shutil.rmtree(sibling, ignore_errors=True)


class BucketTarget(SaveTarget):
    """A URL: what makes it a checkpoint is removed first and written last, since buckets cannot rename.

    Files of other names stay as they are.
    """

    def __init__(self, url: str, token: str) -> None:
        super().__init__(token)
        self._url = url.rstrip("/")
        self._filesystem, root = url_to_fs(url)
        self._root = root.rstrip("/")
        self._marker = f"{self._root}/.saving-{token}"

    @property
    def lease(self) -> str:
        return f"{self._url}/{LEASE}"

    def check(self) -> None:
        self._filesystem.makedirs(self._root, exist_ok=True)
        self._filesystem.pipe_file(self._marker, b"Whether it can be written is tried.\n")
        self._filesystem.rm_file(self._marker)

    def begin(self) -> None:
        self._filesystem.makedirs(self._root, exist_ok=True)
        self._remove()
        self._filesystem.pipe_file(self._marker, b"This checkpoint is not complete.\n")

    def seen(self) -> bool:
        self._filesystem.invalidate_cache()
        return bool(self._filesystem.exists(self._marker))

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Writable]:
        file = self._filesystem.open(f"{self._root}/{name}", "wb")
        try:
            yield file
        except BaseException:
            with contextlib.suppress(Exception):  # storage libraries have their own
                file.discard()
                file.closed = True  # nobody closes it later, which would make the part an object
            with contextlib.suppress(Exception):
                self._filesystem.rm_file(f"{self._root}/{name}")  # where it is there as soon as it is opened
            raise
        file.close()

    def write_small(self, write: Callable[[str], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="lockstep-save-") as directory:
            write(directory)
            files = sorted(pathlib.Path(directory).iterdir(), key=lambda file: file.name == CONFIG_NAME)
            for file in files:
                self._filesystem.pipe_file(f"{self._root}/{file.name}", file.read_bytes())

    def commit(self) -> None:
        self._filesystem.rm_file(self._marker)

    def abort(self) -> None:
        with contextlib.suppress(Exception):  # storage libraries have their own
            self._remove()

    def _remove(self) -> None:
        self._filesystem.invalidate_cache()
        paths = {path.rsplit("/", 1)[-1]: path for path in self._filesystem.find(self._root, maxdepth=1)}
        # Without its configuration nobody takes the rest for a checkpoint.
        for name in sorted(paths, key=lambda name: name != CONFIG_NAME):
            if name == CONFIG_NAME or name.startswith(".saving-") or _WEIGHTS.fullmatch(name):
                self._filesystem.rm_file(paths[name])


def save_target(path: str | os.PathLike[str], token: str) -> SaveTarget:
    """Return where to save."""
    path = os.fspath(path)
    if "://" not in path:
        return LocalTarget(path, token)
    filesystem, root = url_to_fs(path)
    return LocalTarget(root, token) if isinstance(filesystem, LocalFileSystem) else BucketTarget(path, token)
