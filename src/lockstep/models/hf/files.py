"""The files of a safetensors checkpoint, one or several with an index, whose tensors are read by rows."""

import concurrent.futures
import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np

from lockstep.errors import ConfigError
from lockstep.json_text import parse_json, refused
from lockstep.models.hf.tensor_file import TensorFile
from lockstep.urls import check_bare_name, url_to_fs

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
AGAIN = "Download the checkpoint again."
"""What to do where its files do not go together."""
_THREADS = 8
"""Headers that are read at a time."""


class CheckpointFiles:
    """The files of a checkpoint, with their headers. Threads may share it.

    Args:
        directory: The local directory or fsspec URL with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and the files that it names. Ranges are read; nothing is copied to this
            host's disk.

    Raises:
        ConfigError: A file is missing or is not safetensors.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = os.fspath(directory)
        self._filesystem, root = url_to_fs(self.directory)
        self._root = root.rstrip("/")
        listed = [path for path in self._filesystem.glob(f"{self._root}/*") if not self._filesystem.isdir(path)]
        names = {path.rsplit("/", 1)[-1] for path in listed}
        if INDEX_NAME in names:
            place = f"{self.directory}/{INDEX_NAME}"
            index = parse_json(self._filesystem.cat_file(f"{self._root}/{INDEX_NAME}"), place, dict, AGAIN)
            with refused(place, AGAIN):
                self._file_of: dict[str, str] = {**index["weight_map"]}
                missing = sorted(check_bare_name(file, place) for file in {*self._file_of.values()} - names)
            if missing:
                raise ConfigError(f"{place} names {', '.join(missing)}, which is not there. {AGAIN}")
            self._open = self._open_all(sorted(set(self._file_of.values())))
        elif SINGLE_NAME in names:
            self._open = self._open_all([SINGLE_NAME])
            self._file_of = dict.fromkeys(self._open[SINGLE_NAME].names, SINGLE_NAME)
        else:
            found = ", ".join(sorted(names)) or "nothing"
            raise ConfigError(
                f"{self.directory} has neither {SINGLE_NAME} nor {INDEX_NAME}; found {found}. Save the checkpoint as "
                "safetensors (transformers: save_pretrained)."
            )

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._file_of)

    def file_of(self, name: str) -> str:
        """Returns the name of the file that has a tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the stored shape of a tensor.

        Raises:
            ConfigError: The index names a file that does not have the tensor.
        """
        return self._opened(name).shape(name)

    def row_bytes(self, name: str) -> int:
        """Returns the stored bytes of one entry of a tensor's first dimension.

        Raises:
            ConfigError: The tensor cannot be read; the error names it and its file.
        """
        with self._named(name):
            return self._opened(name).row_bytes(name)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads the rows from ``start`` to ``stop`` of a tensor, in its stored dtype, in one request.

        Raises:
            ConfigError: The rows cannot be read; the error names the tensor and its file.
        """
        with self._named(name):
            return self._opened(name).read(name, start, stop)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            file = f"{self.directory}/{self._file_of[name]}"
            raise ConfigError(f"tensor {name} in {file} cannot be read: {error}") from error

    def _opened(self, name: str) -> TensorFile:
        file = self._file_of[name]
        if name not in self._open[file].names:
            raise ConfigError(f"{INDEX_NAME} says tensor {name} is in {file}; it is not. {AGAIN}")
        return self._open[file]

    def _open_all(self, files: list[str]) -> dict[str, TensorFile]:
        with concurrent.futures.ThreadPoolExecutor(_THREADS, "lockstep-headers") as pool:
            return dict(zip(files, pool.map(self._open_one, files), strict=True))

    def _open_one(self, file: str) -> TensorFile:
        try:
            return TensorFile(self._filesystem, f"{self._root}/{file}")
        except Exception as error:
            raise ConfigError(f"{self.directory}/{file} cannot be read as safetensors: {error}") from error


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
    filesystem, root = url_to_fs(path)
    files = [f for f in filesystem.glob(f"{root.rstrip('/')}/{pattern}") if not filesystem.isdir(f)]
    if not files:
        raise ConfigError(f"there are no files {pattern} at {path}. Check the URL and the access rights.")
    with tempfile.TemporaryDirectory(prefix="lockstep-checkpoint-") as temporary:
        for file in files:
            filesystem.get_file(file, f"{temporary}/{file.rsplit('/', 1)[-1]}")
        yield pathlib.Path(temporary)
