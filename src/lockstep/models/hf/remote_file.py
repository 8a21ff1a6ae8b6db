"""A safetensors file at a URL, read in ranges: the header once, then only the rows that are needed."""

import json
import math
from collections.abc import KeysView
from typing import Any

import ml_dtypes
import numpy as np

from lockstep.errors import ConfigError

CHUNK_BYTES = 8 << 20
"""The bytes, about, that a thread reads at a time; at least one row of a tensor."""
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


class RemoteFile:
    """One file of tensors, in the format of https://github.com/huggingface/safetensors.

    Args:
        filesystem: The fsspec file system.
        path: The path on it.

    Raises:
        ConfigError: The file is not safetensors.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        length = int.from_bytes(filesystem.cat_file(path, start=0, end=_LENGTH_BYTES), "little")
        if not 0 < length <= _LONGEST_HEADER:
            raise ConfigError(
                f"{path} is not a safetensors file: its header would have {length} bytes. Upload it again."
            )
        self._data = _LENGTH_BYTES + length
        try:
            header = json.loads(filesystem.cat_file(path, start=_LENGTH_BYTES, end=self._data))
        except ValueError as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}. Upload it again.") from error
        self._tensors: dict[str, Any] = {name: entry for name, entry in header.items() if name != "__metadata__"}

    def keys(self) -> KeysView[str]:
        """Returns the names of its tensors."""
        return self._tensors.keys()

    def get_slice(self, name: str) -> "RemoteTensor":
        """Returns a tensor that is read when it is indexed."""
        entry = self._tensors[name]
        if entry["dtype"] not in _DTYPES:
            raise ConfigError(f"tensor {name} in {self._path} has dtype {entry['dtype']}, which cannot be read.")
        start = self._data + entry["data_offsets"][0]
        return RemoteTensor(self._filesystem, self._path, entry["shape"], np.dtype(_DTYPES[entry["dtype"]]), start)


class RemoteTensor:
    """A tensor in a remote file; ``tensor[slices]`` reads the rows of its first dimension that the slices cover."""

    def __init__(self, filesystem: Any, path: str, shape: list[int], dtype: np.dtype[Any], start: int) -> None:
        self._filesystem, self._path = filesystem, path
        self._shape, self._dtype, self._start = tuple(shape), dtype, start

    def get_shape(self) -> list[int]:
        """Returns its shape."""
        return list(self._shape)

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        first, *rest = (part.indices(size)[:2] for part, size in zip(slices, self._shape, strict=True))
        inner = tuple(slice(*bounds) for bounds in rest)
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        block = np.empty([stop - start for start, stop in (first, *rest)], self._dtype)
        rows = max(1, CHUNK_BYTES // max(1, row_bytes))
        for row in range(first[0], first[1], rows):
            end = min(row + rows, first[1])
            span = self._start + row * row_bytes, self._start + end * row_bytes
            data = self._filesystem.cat_file(self._path, start=span[0], end=span[1])
            chunk = np.frombuffer(data, self._dtype).reshape(end - row, *self._shape[1:])
            block[row - first[0] : end - first[0]] = chunk[(slice(None), *inner)]
        return block
