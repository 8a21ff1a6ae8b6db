"""The files of a safetensors checkpoint, on a disk or at a URL: headers are read once, then ranges of rows."""

import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import ml_dtypes
import numpy as np

from lockstep.errors import ConfigError
from lockstep.json_text import parse_json, refused
from lockstep.models.hf.mxfp4 import BLOCK, BLOCKS, SCALES, packed_names, unpack
from lockstep.urls import check_bare_name, patient_with_hub, url_to_fs

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100 << 20
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class TensorFile:
    """One file of tensors, in the format of https://github.com/huggingface/safetensors. Threads may share it.

    Args:
        header: What `read_header` returned, here or on another host; None to read it.

    Raises:
        ConfigError: The file is not safetensors.
    """

    def __init__(self, filesystem: Any, path: str, header: bytes | None = None) -> None:
        self._filesystem, self._path = filesystem, path
        text = read_header(filesystem, path) if header is None else header
        self._data = _LENGTH_BYTES + len(text)
        again = "Save or upload it again."
        self._tensors: dict[str, Any] = {}
        for name, entry in parse_json(text, "its header", dict, again).items():
            if name != "__metadata__":
                with refused(f"what its header says of {name!r}", again):
                    self._tensors[name] = _checked(entry)

    @property
    def names(self) -> Set[str]:
        """The names of its tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name]["shape"])

    def row_bytes(self, name: str) -> int:
        """Return the bytes of one entry of a tensor's first dimension.

        Raises:
            ConfigError: The tensor has a dtype that NumPy does not know.
        """
        return math.prod(self.shape(name)[1:]) * self._dtype(name).itemsize

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read the rows from ``start`` to ``stop`` of a tensor, in its stored dtype, in one request.

        Raises:
            ConfigError: The file ends before the rows do, or the tensor has a dtype that NumPy does not know.
        """
        dtype, row = self._dtype(name), self.row_bytes(name)
        first = self._data + self._tensors[name]["data_offsets"][0]
        data = patient_with_hub(
            self._path, lambda: self._filesystem.cat_file(self._path, start=first + start * row, end=first + stop * row)
        )
        if len(data) != (stop - start) * row:
            raise ConfigError(
                f"{len(data)} bytes came where {(stop - start) * row} were asked for: the file is shorter than its "
                "header says. Download or upload it again."
            )
        return np.frombuffer(data, dtype).reshape(stop - start, *self.shape(name)[1:])

    def stored_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in the file, whatever its dtype."""
        start, end = self._tensors[name]["data_offsets"]
        return max(0, end - start)

    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        """Read bytes of a tensor, whatever its dtype, in one request; fewer where it ends before."""
        begin, end = (self._data + each for each in self._tensors[name]["data_offsets"])
        data: bytes = patient_with_hub(
            self._path,
            lambda: self._filesystem.cat_file(self._path, start=begin + start, end=min(begin + start + count, end)),
        )
        return data

    def _dtype(self, name: str) -> np.dtype[Any]:
        stored = self._tensors[name]["dtype"]
        if stored not in _DTYPES:
            raise ConfigError(f"its dtype is {stored}, which cannot be read. Save it as one of {', '.join(_DTYPES)}.")
        return np.dtype(_DTYPES[stored])


def read_header(filesystem: Any, path: str) -> bytes:
    """Read the header of a file of tensors: the JSON that says where each is.

    Raises:
        ConfigError: Its length is none of a header.
    """
    length = int.from_bytes(filesystem.cat_file(path, start=0, end=_LENGTH_BYTES), "little")
    if not 0 < length <= _LONGEST_HEADER:
        raise ConfigError(f"its header would have {length} bytes. Save or upload it again.")
    header: bytes = filesystem.cat_file(path, start=_LENGTH_BYTES, end=_LENGTH_BYTES + length)
    return header


def _checked(entry: Any) -> Any:
    """The entry of a tensor in a header, checked: NumPy counts bytes in 63 bits."""
    sizes = [*entry["shape"], *entry["data_offsets"]]
    if not all(type(each) is int and 0 <= each < 1 << 48 for each in sizes) or len(entry["data_offsets"]) != 2:
        raise ValueError(f"its shape is {entry['shape']!r} at bytes {entry['data_offsets']!r}")
    if math.prod(map(float, entry["shape"])) > 1 << 50 or not isinstance(entry["dtype"], str):
        raise ValueError(f"{entry['shape']!r} of {entry['dtype']!r} is larger than any tensor")
    return entry


CONFIG_NAME = "config.json"
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

    Raises:
        ConfigError: A file is missing or is not safetensors.
    """

    def __init__(self, directory: str | os.PathLike[str], heads: Mapping[str, bytes] | None = None):
        self.directory = os.fspath(directory)
        heads = read_heads(self.directory) if heads is None else heads
        self._filesystem, root = url_to_fs(self.directory)
        self.opened: dict[str, TensorFile] = {}  # by the name of the file
        self._scales_file_of: dict[str, str] = {}
        files, file_of = _weight_map(self.directory, heads)
        for file in files:
            with _named_file(f"{self.directory}/{file}"):
                self.opened[file] = TensorFile(self._filesystem, f"{root.rstrip('/')}/{file}", heads[file])
        self._file_of = dict.fromkeys(self.opened[SINGLE_NAME].names, SINGLE_NAME) if file_of is None else file_of
        self._packed = packed_names(self._file_of)
        for name in self._packed:  # two tensors, which are read as one
            self._file_of[name] = self._file_of.pop(name + BLOCKS)
            self._scales_file_of[name] = self._file_of.pop(name + SCALES)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._file_of)

    def file_of(self, name: str) -> str:
        """Return the name of the file that has a tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is read.

        Raises:
            ConfigError: The index names a file that does not have the tensor, or what is packed does not go together.
        """
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
        with self._named(name):
            if name in self._packed:
                return sum(file.row_bytes(stored) for file, stored in self._opened_packed(name))
            return self._opened(name).row_bytes(name)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read the rows from ``start`` to ``stop`` of a tensor, in its stored dtype, in one request.

        What is packed in 4 bits takes two requests and comes in bfloat16.

        Raises:
            ConfigError: The rows cannot be read; the error names the tensor and its file.
        """
        with self._named(name):
            if name in self._packed:
                return unpack(*(file.read(stored, start, stop) for file, stored in self._opened_packed(name)))
            return self._opened(name).read(name, start, stop)

    def read_rows(self, names: Sequence[str], start: int, stop: int) -> np.ndarray:
        """Read the rows from ``start`` to ``stop`` of tensors of one shape, counted through all of them."""
        rows = self.shape(names[0])[0]
        spans = ((name, start - rows * place, stop - rows * place) for place, name in enumerate(names))
        parts = [self.read(name, max(a, 0), min(b, rows)) for name, a, b in spans if a < rows and b > 0]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            file = f"{self.directory}/{self._file_of[name]}"
            raise ConfigError(f"tensor {name} in {file} cannot be read: {error}") from error

    def _opened(self, name: str) -> TensorFile:
        return self._opened_file(name, self._file_of[name])

    def _opened_packed(self, name: str) -> list[tuple[TensorFile, str]]:
        """The file of the numbers of a packed tensor and that of their exponents, each with the name it has there."""
        places = ((name + BLOCKS, self._file_of[name]), (name + SCALES, self._scales_file_of[name]))
        return [(self._opened_file(stored, file), stored) for stored, file in places]

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
    return patient_with_hub(directory, lambda: _read_heads(directory))


def _read_heads(directory: str) -> dict[str, bytes]:
    filesystem, root = url_to_fs(directory)
    root = root.rstrip("/")
    listed = [path for path in filesystem.glob(f"{root}/*") if not filesystem.isdir(path)]
    heads = {path.rsplit("/", 1)[-1]: b"" for path in listed}
    for name in {CONFIG_NAME, INDEX_NAME} & heads.keys():
        heads[name] = filesystem.cat_file(f"{root}/{name}")

    def read(file: str) -> bytes:
        with _named_file(f"{directory}/{file}"):
            return read_header(filesystem, f"{root}/{file}")

    files, _ = _weight_map(directory, heads)
    with concurrent.futures.ThreadPoolExecutor(_THREADS, "lockstep-headers") as pool:
        return heads | dict(zip(files, pool.map(read, files), strict=True))


def pack_heads(heads: Mapping[str, bytes]) -> bytes:
    """Return what `read_heads` returned as bytes for other hosts."""
    return json.dumps({name: data.decode("latin-1") for name, data in heads.items()}).encode()


def unpack_heads(data: bytes) -> dict[str, bytes]:
    """Return what `pack_heads` packed.

    Raises:
        ConfigError: It is something else.
    """
    what = "what process 0 read of the checkpoint"
    with refused(what, AGAIN):
        return {name: text.encode("latin-1") for name, text in parse_json(data, what, dict, AGAIN).items()}


def _weight_map(directory: str, heads: Mapping[str, bytes]) -> tuple[list[str], dict[str, str] | None]:
    """The files of tensors, and the one of each tensor where there is an index."""
    if INDEX_NAME in heads:
        place = f"{directory}/{INDEX_NAME}"
        index = parse_json(heads[INDEX_NAME], place, dict, AGAIN)
        with refused(place, AGAIN):
            file_of: dict[str, str] = {**index["weight_map"]}
            missing = sorted(check_bare_name(file, place) for file in {*file_of.values()} - heads.keys())
        if missing:
            raise ConfigError(f"{place} names {', '.join(missing)}, which is not there. {AGAIN}")
        return sorted(set(file_of.values())), file_of
    if SINGLE_NAME not in heads:
        found = ", ".join(sorted(heads)) or "nothing"
        raise ConfigError(
            f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}; found {found}. Save the checkpoint as "
            "safetensors (transformers: save_pretrained)."
        )
    return [SINGLE_NAME], None


@contextlib.contextmanager
def _named_file(file: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error


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
