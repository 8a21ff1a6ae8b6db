"""The files of a safetensors checkpoint, one or several with an index, whose tensors are read in slices."""

import contextlib
import json
import os
import pathlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import fsspec
import ml_dtypes  # noqa: F401  (teaches NumPy the bfloat16 that safetensors returns)
import numpy as np
import safetensors

from lockstep.errors import ConfigError
from lockstep.models.hf.remote_file import RemoteFile

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The library has no type hints.
_open_file: Any = safetensors.safe_open


class CheckpointFiles:
    """A context manager that opens each file of a checkpoint when it is first needed. Threads may share it.

    Args:
        directory: The local directory or fsspec URL with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and the files that it names. From a URL, ranges are read; nothing is copied
            to this host's disk.

    Raises:
        ConfigError: A file is missing or is not safetensors.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = os.fspath(directory)
        self._stack = contextlib.ExitStack()
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._remote = "://" in self.directory
        self._filesystem, root = fsspec.core.url_to_fs(self.directory)
        self._root = root.rstrip("/")
        listed = [path for path in self._filesystem.glob(f"{self._root}/*") if not self._filesystem.isdir(path)]
        names = {path.rsplit("/", 1)[-1] for path in listed}
        if INDEX_NAME in names:
            index = json.loads(self._filesystem.cat_file(f"{self._root}/{INDEX_NAME}"))
            self._file_of: dict[str, str] = index["weight_map"]
            if missing := sorted(set(self._file_of.values()) - names):
                raise ConfigError(
                    f"{self.directory}/{INDEX_NAME} names {', '.join(missing)}, which is not there. Download the "
                    "checkpoint again."
                )
        elif SINGLE_NAME in names:
            self._file_of = dict.fromkeys(self._handle(SINGLE_NAME).keys(), SINGLE_NAME)
        else:
            found = ", ".join(sorted(names)) or "nothing"
            raise ConfigError(
                f"{self.directory} has neither {SINGLE_NAME} nor {INDEX_NAME}; found {found}. Save the checkpoint as "
                "safetensors (transformers: save_pretrained)."
            )

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._file_of)

    def file_of(self, name: str) -> str:
        """Returns the name of the file that has a tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the stored shape of a tensor; reads only the file's header.

        Raises:
            ConfigError: The index names a file that does not have the tensor.
        """
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """Reads a block of a tensor, in its stored dtype; reads only those bytes."""
        return self._slice(name)[slices]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        handle = self._handle(file)
        if name not in handle.keys():
            raise ConfigError(
                f"{INDEX_NAME} says tensor {name} is in {file}; it is not. Download the checkpoint again."
            )
        return handle.get_slice(name)

    def _handle(self, file: str) -> Any:
        with self._lock:
            if file not in self._open:
                path = f"{self._root}/{file}"
                try:
                    if self._remote:
                        self._open[file] = RemoteFile(self._filesystem, path)
                    else:
                        self._open[file] = self._stack.enter_context(_open_file(path, framework="numpy"))
                except Exception as error:
                    raise ConfigError(f"{self.directory}/{file} cannot be read as safetensors: {error}") from error
            return self._open[file]


@contextlib.contextmanager
def local_directory(path: str | os.PathLike[str], *, pattern: str = "*") -> Iterator[pathlib.Path]:
    """Yields the directory at a path; for a URL, a temporary copy that is removed at the end.

    Args:
        path: The local directory, or an fsspec URL such as ``gs://bucket/checkpoint``.
        pattern: The glob pattern of the files that are copied from a URL.

    Raises:
        ConfigError: There is no such directory, or no such file at the URL.
    """
    path = os.fspath(path)
    if "://" not in path:
        directory = pathlib.Path(path).expanduser()
        if not directory.is_dir():
            raise ConfigError(
                f"there is no checkpoint directory {path}. Give a local directory or a URL; a checkpoint on the "
                "Hugging Face hub is first downloaded with `hf download <name> --local-dir <directory>`."
            )
        yield directory
        return
    filesystem, root = fsspec.core.url_to_fs(path)
    files = [f for f in filesystem.glob(f"{root.rstrip('/')}/{pattern}") if not filesystem.isdir(f)]
    if not files:
        raise ConfigError(f"there are no files {pattern} at {path}. Check the URL and the access rights.")
    with tempfile.TemporaryDirectory(prefix="lockstep-checkpoint-") as temporary:
        for file in files:
            filesystem.get_file(file, f"{temporary}/{file.rsplit('/', 1)[-1]}")
        yield pathlib.Path(temporary)
