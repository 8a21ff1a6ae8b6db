"""The files of a safetensors checkpoint, on a disk or at a URL: headers are read once, then ranges of rows."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np

from lockstep.errors import ConfigError, HostTimeoutError
from lockstep.json_text import parse_json, refused
from lockstep.limits import read_object
from lockstep.models.hf import fp8
from lockstep.models.hf.fp8 import FACTORS, scaled_names
from lockstep.models.hf.mxfp4 import BLOCK, BLOCKS, SCALES, packed_names, unpack
from lockstep.models.hf.stored_names import StoredName, stored_names
from lockstep.models.hf.tensor_file import TensorFile, read_header
from lockstep.urls import check_bare_name, url_to_fs

CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
AGAIN = "Download the checkpoint again."
"""The fix where its files do not go together."""
_THREADS = 8
"""Headers that are read at a time."""


class CheckpointFiles:
    """The files of a checkpoint, with their headers. Threads may share it.

    Args:
        directory: The local directory or fsspec URL with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and the files that it names. Ranges are read; nothing is copied to this
            host's disk.

        heads: What `read_heads` returned, here or on another host; None to read it.
        tied: Whether the output layer is the embedding, so that either has both.

    Raises:
        ConfigError: A file is missing or is not safetensors, or it is not clear which files are the model's.
    """

    def __init__(
        self, directory: str | os.PathLike[str], heads: Mapping[str, bytes] | None = None, *, tied: bool = False
    ):
        self._tied = tied
        self.directory = os.fspath(directory)
        heads = read_heads(self.directory) if heads is None else heads
        self._filesystem, root = url_to_fs(self.directory)
        self.opened: dict[str, TensorFile] = {}  # by the name of the file
        self._scales_file_of: dict[str, str] = {}
        files, file_of = _weight_map(self.directory, heads)
        for file in files:
            with _refused(f"{self.directory}/{file} cannot be read as safetensors"):
                self.opened[file] = TensorFile(self._filesystem, f"{root.rstrip('/')}/{file}", heads[file])
        self._file_of = dict(file_of)
        for file, opened in self.opened.items():  # transformers, too, reads tensors that the index does not name
            for name in opened.names:
                if (named := self._file_of.setdefault(name, file)) != file:
                    raise ConfigError(
                        f"{self.directory} has tensor {name} in {file}, and in {named} by its header or {INDEX_NAME}. "
                        f"{AGAIN}"
                    )
        self._places: dict[str, StoredName | None] = {}
        self._packed = packed_names(self._file_of)
        for name in self._packed:  # two tensors, which are read as one
            self._file_of[name] = self._file_of.pop(name + BLOCKS)
            self._scales_file_of[name] = self._file_of.pop(name + SCALES)
        scaled = scaled_names(self._file_of)
        self._scaled = {name for name in scaled if self._opened(name).stored_dtype(name) == "F8_E4M3"}
        for name in self._scaled:
            self._scales_file_of[name] = self._file_of.pop(name + FACTORS)

    def check_sizes(self) -> None:
        """Check that the files are as long as their headers say.

        Raises:
            ConfigError: One is shorter.
        """
        for name, file in self.opened.items():
            with _refused(f"{self.directory}/{name} cannot be read as safetensors"):
                file.check_size()

    @property
    def names(self) -> set[str]:
        """The names of all tensors, as they are stored."""
        return set(self._file_of)

    def place(self, name: str) -> StoredName | None:
        """Return the stored tensor that has a tensor of the model, or part of it; None where there is none."""
        if name not in self._places:
            places = (stored for stored in stored_names(name, tied=self._tied) if stored.name in self._file_of)
            parts = (
                stored for stored in places if stored.expert is None or stored.fits(self._stored_shape(stored.name))
            )
            self._places[name] = next(parts, None)
        return self._places[name]

    def file_of(self, name: str) -> str:
        """Return the name of the file that has a tensor."""
        return self._file_of[self._place(name).name]

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of a tensor as the format spells it, such as ``BF16``."""
        stored = self._place(name).name
        if stored in self._packed:
            return "MXFP4"
        return "FP8" if stored in self._scaled else self._opened(stored).stored_dtype(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is read.

        Raises:
            ConfigError: The index names a file that does not have the tensor, or what is packed does not go together.
        """
        place = self._place(name)
        return place.rows(self._stored_shape(place.name))[1]

    def _place(self, name: str) -> StoredName:
        place = self.place(name)
        assert place is not None, name
        return place

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        if name in self._scaled:
            shape, factors = self._opened(name).shape(name), self._factors_file(name).shape(name + FACTORS)
            if len(shape) != 2 or factors != tuple(-(-size // fp8.BLOCK) for size in shape):
                raise ConfigError(
                    f"tensor {name} has shape {shape} and {name}{FACTORS} has {factors}; FP8 is read with a factor for "
                    f"each block of {fp8.BLOCK} rows and columns. {AGAIN}"
                )
            return shape
        if name not in self._packed:
            return self._opened(name).shape(name)
        blocks, scales = (file.shape(stored) for file, stored in self._opened_packed(name))
        if len(blocks) != 4 or blocks[3] != BLOCK // 2 or blocks[:3] != scales:
            raise ConfigError(
                f"tensor {name}{BLOCKS} has shape {blocks} and {name}{SCALES} has {scales}; MXFP4 has [expert, output, "
                f"block, {BLOCK // 2}] and [expert, output, block]. {AGAIN}"
            )
        return blocks[0], blocks[2] * BLOCK, blocks[1]

    def row_bytes(self, name: str) -> int:
        """Return the stored bytes of one entry of a tensor's first dimension.

        Raises:
            ConfigError: The tensor cannot be read; the error names it and its file.
        """
        with self._named(name) as place:
            if place.name in self._packed:
                return sum(file.row_bytes(stored) for file, stored in self._opened_packed(place.name))
            return self._opened(place.name).row_bytes(place.name, self.shape(name)[1:])

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read the rows from ``start`` to ``stop`` of a tensor, in its stored dtype, in one request.

        What is stored in 4 or 8 bits takes two requests and comes in bfloat16.

        Raises:
            ConfigError: The rows cannot be read; the error names the tensor and its file.
        """
        with self._named(name) as place:
            if place.name in self._packed:
                return unpack(*(file.read(stored, start, stop) for file, stored in self._opened_packed(place.name)))
            if place.name in self._scaled:
                block, end = start // fp8.BLOCK, -(-stop // fp8.BLOCK)
                factors = self._factors_file(place.name).read(place.name + FACTORS, block, end)
                numbers = self._opened(place.name).read(place.name, start, stop)
                return fp8.scaled(numbers, factors, start - block * fp8.BLOCK)
            first, shape = place.rows(self._stored_shape(place.name))
            return self._opened(place.name).read(place.name, first + start, first + stop, shape[1:])

    def read_rows(self, names: Sequence[str], start: int, stop: int) -> np.ndarray:
        """Read the rows from ``start`` to ``stop`` of tensors of one shape, counted through all of them."""
        rows = self.shape(names[0])[0]
        spans = ((name, start - rows * place, stop - rows * place) for place, name in enumerate(names))
        parts = [self.read(name, max(a, 0), min(b, rows)) for name, a, b in spans if a < rows and b > 0]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[StoredName]:
        place = self._place(name)
        with _refused(f"tensor {place.name} in {self.directory}/{self._file_of[place.name]} cannot be read"):
            yield place

    def _opened(self, name: str) -> TensorFile:
        return self._opened_file(name, self._file_of[name])

    def _opened_packed(self, name: str) -> list[tuple[TensorFile, str]]:
        """The file of the numbers of a packed tensor and that of their exponents, each with the name it has there."""
        places = ((name + BLOCKS, self._file_of[name]), (name + SCALES, self._scales_file_of[name]))
        return [(self._opened_file(stored, file), stored) for stored, file in places]

    def _factors_file(self, name: str) -> TensorFile:
        return self._opened_file(name + FACTORS, self._scales_file_of[name])

    def _opened_file(self, stored: str, file: str) -> TensorFile:
        if stored not in self.opened[file].names:
            raise ConfigError(f"{INDEX_NAME} says tensor {stored} is in {file}; it is not. {AGAIN}")
        return self.opened[file]


def read_heads(directory: str) -> dict[str, bytes]:
    """Read what is to be known of a checkpoint before its rows, by the name of each of its files.

    It is the header of a file of tensors, all of the configuration and the index, and nothing of others.

    Raises:
        ConfigError: A file is missing or is not safetensors.
    """
    filesystem, root = url_to_fs(directory)
    root = root.rstrip("/")
    heads = dict.fromkeys(files_in(filesystem, root), b"")
    for name in {CONFIG_NAME, INDEX_NAME} & heads.keys():
        heads[name] = read_object(filesystem, f"{root}/{name}")

    def read(file: str) -> bytes:
        with _refused(f"{directory}/{file} cannot be read as safetensors"):
            return read_header(filesystem, f"{root}/{file}")

    files, _ = _weight_map(directory, heads)
    with concurrent.futures.ThreadPoolExecutor(_THREADS, "lockstep-headers") as pool:
        return heads | dict(zip(files, pool.map(read, files), strict=True))


def files_in(filesystem: Any, directory: str) -> dict[str, str]:
    """Return the paths of a directory's files by name, whatever characters its own path has; none where it is none."""
    try:
        listed = filesystem.ls(directory, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    paths = [entry["name"] for entry in listed if entry["type"] == "file" or not filesystem.isdir(entry["name"])]
    return {name: path for path in paths if (name := path.rsplit("/", 1)[-1]) and path != directory}


def has_tensors(directory: str | os.PathLike[str]) -> bool:
    """Whether there are safetensors in a directory or at a URL, which may have a configuration alone."""
    filesystem, root = url_to_fs(directory)
    return bool({SINGLE_NAME, INDEX_NAME} & files_in(filesystem, root.rstrip("/")).keys())


def pack_heads(heads: Mapping[str, bytes]) -> bytes:
    """Return what `read_heads` returned as bytes for other hosts."""
    return json.dumps({name: data.decode("latin-1") for name, data in heads.items()}).encode()


def unpack_heads(data: bytes) -> dict[str, bytes]:
    """Return what `pack_heads` packed.

    Raises:
        ConfigError: It is something else.
    """
    origin = "what process 0 read of the checkpoint"
    with refused(origin, AGAIN):
        return {name: text.encode("latin-1") for name, text in parse_json(data, origin, dict, AGAIN).items()}


FOREIGN: Final = {
    ".gguf": "llama.cpp", ".h5": "Keras", ".keras": "Keras", ".msgpack": "Flax", ".nemo": "NeMo", ".npz": "MLX",
    ".onnx": "ONNX", **dict.fromkeys((".bin", ".ckpt", ".distcp", ".pt", ".pth"), "PyTorch"),
}  # fmt: skip
"""The program that stores models in files of an ending."""


def check_is_model(directory: str | os.PathLike[str], names: Iterable[str]) -> None:
    """Refuse a directory whose files are those of an adapter, or a model as another program stores it.

    Raises:
        ConfigError: They are.
    """
    if ADAPTER_NAME in (names := sorted(names)):
        raise ConfigError(
            f"{os.fspath(directory)} has {ADAPTER_NAME}: transformers would add its adapter to the model, and lockstep "
            "reads models alone. Give the base model, or merge the adapter (peft: merge_and_unload) and save that."
        )
    if any(name.endswith(".safetensors") for name in names):
        return
    for name in names:
        if program := FOREIGN.get(pathlib.PurePath(name).suffix):
            raise ConfigError(
                f"{os.fspath(directory)} has {name}, a model as {program} stores it, and no safetensors. Read it by "
                "transformers where that can, and save it again (save_pretrained)."
            )


def other_format(filesystem: Any, directory: str) -> str:
    """The fix for a directory without ``config.json``, by the names that are in it."""
    names = set[str]()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = {entry.rsplit("/", 1)[-1] for entry in filesystem.ls(directory, detail=False)}
    if "snapshots" in names:
        return "It is a model's folder of the Hugging Face cache. Give one of those in its snapshots."
    if names & {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "items"} or {"metadata.json", "model"} <= names:
        return (
            "It is a checkpoint of a trainer, as Orbax or TensorStore write them. Export the model to Hugging Face's "
            "format (Levanter and MaxText have a script; a run of ours: lockstep export)."
        )
    if "params.json" in names:
        return "It has params.json, the format of Meta or Mistral. Download the model in that of transformers."
    return "Give the directory of a Hugging Face checkpoint."


def _weight_map(directory: str, heads: Mapping[str, bytes]) -> tuple[list[str], dict[str, str]]:
    """The files of tensors, and the one of each tensor that an index says."""
    check_is_model(directory, heads)
    if INDEX_NAME in heads:
        place = f"{directory}/{INDEX_NAME}"
        index = parse_json(heads[INDEX_NAME], place, dict, AGAIN)
        with refused(place, AGAIN):
            file_of: dict[str, str] = {**index["weight_map"]}
            missing = sorted(check_bare_name(file, place) for file in {*file_of.values()} - heads.keys())
        if missing:
            raise ConfigError(f"{place} names {', '.join(missing)}, which is not there. {AGAIN}")
        if SINGLE_NAME in heads and SINGLE_NAME not in file_of.values():
            raise ConfigError(
                f"{directory} has {SINGLE_NAME} and {INDEX_NAME}, which names other files: transformers would read the "
                "first, other programs the second. Remove the one that is not the model, with its files."
            )
        return sorted(set(file_of.values())), file_of
    if SINGLE_NAME not in heads:
        names = ", ".join(sorted(heads)) or "nothing"
        tensors = [name for name in heads if name.endswith(".safetensors")]  # none: half of a download
        in_parts = any(name.startswith("model-0") for name in tensors)
        fix = "Save the checkpoint as safetensors (transformers: save_pretrained)."
        raise ConfigError(
            f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}; found {names}. "
            f"{AGAIN if in_parts or not tensors else fix}"
        )
    return [SINGLE_NAME], {}


@contextlib.contextmanager
def _refused(fault: str) -> Iterator[None]:
    try:
        yield
    except HostTimeoutError:
        raise
    except Exception as error:
        fix = "" if isinstance(error, ConfigError) else f". {AGAIN}"
        raise ConfigError(f"{fault}: {error}{fix}") from error


@contextlib.contextmanager
def local_directory(path: str | os.PathLike[str], *, pattern: str = "*") -> Iterator[pathlib.Path]:
    """Yield the directory at a path; for a URL, a temporary copy that is removed at the end.

    Args:
        path: The local directory, or an fsspec URL such as ``gs://bucket/checkpoint``.
        pattern: The glob pattern of the files that are copied from a URL.

    Raises:
        ConfigError: There is no such directory, or no such file at the URL.
    """
    path = os.fspath(path)
    if "://" not in path:
        directory = pathlib.Path(path).expanduser()
        if directory.is_file():
            check_is_model(directory.parent, [directory.name])
            raise ConfigError(f"the checkpoint {path} is a file; it must be a directory. Give the one that it is in.")
        if not directory.is_dir():
            raise ConfigError(
                f"there is no checkpoint directory {path}. Give a local directory or a URL; a checkpoint on the "
                "Hugging Face hub is first downloaded with `hf download <name> --local-dir <directory>`."
            )
        yield directory
        return
    filesystem, root = url_to_fs(path)
    files = {
        name: place for name, place in files_in(filesystem, root.rstrip("/")).items() if fnmatchcase(name, pattern)
    }
    if not files:
        raise ConfigError(f"there are no files {pattern} at {path}. Check the URL and the access rights.")
    with tempfile.TemporaryDirectory(prefix="lockstep-checkpoint-") as temporary:
        for name, place in files.items():
            filesystem.get_file(place, f"{temporary}/{name}")
        yield pathlib.Path(temporary)
