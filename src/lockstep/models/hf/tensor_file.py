"""A safetensors file, on a disk or at a URL: its header is read once, then ranges of rows."""

import math
from collections.abc import Set
from typing import Any

import ml_dtypes
import numpy as np

from lockstep.errors import ConfigError
from lockstep.json_text import parse_json, refused

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
        filesystem: The fsspec file system.
        path: The path on it.

    Raises:
        ConfigError: The file is not safetensors.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        length = int.from_bytes(filesystem.cat_file(path, start=0, end=_LENGTH_BYTES), "little")
        if not 0 < length <= _LONGEST_HEADER:
            raise ConfigError(f"its header would have {length} bytes. Save or upload it again.")
        self._data = _LENGTH_BYTES + length
        again = "Save or upload it again."
        header = parse_json(filesystem.cat_file(path, start=_LENGTH_BYTES, end=self._data), "its header", dict, again)
        self._tensors: dict[str, Any] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                with refused(f"what its header says of {name!r}", again):
                    self._tensors[name] = _checked(entry)

    @property
    def names(self) -> Set[str]:
        """The names of its tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return tuple(self._tensors[name]["shape"])

    def row_bytes(self, name: str) -> int:
        """Returns the bytes of one entry of a tensor's first dimension.

        Raises:
            ConfigError: The tensor has a dtype that NumPy does not know.
        """
        return math.prod(self.shape(name)[1:]) * self._dtype(name).itemsize

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads the rows from ``start`` to ``stop`` of a tensor, in its stored dtype, in one request.

        Raises:
            ConfigError: The file ends before the rows do, or the tensor has a dtype that NumPy does not know.
        """
        dtype, row = self._dtype(name), self.row_bytes(name)
        first = self._data + self._tensors[name]["data_offsets"][0]
        data = self._filesystem.cat_file(self._path, start=first + start * row, end=first + stop * row)
        if len(data) != (stop - start) * row:
            raise ConfigError(
                f"{len(data)} bytes came where {(stop - start) * row} were asked for: the file is shorter than its "
                "header says. Download or upload it again."
            )
        return np.frombuffer(data, dtype).reshape(stop - start, *self.shape(name)[1:])

    def _dtype(self, name: str) -> np.dtype[Any]:
        stored = self._tensors[name]["dtype"]
        if stored not in _DTYPES:
            raise ConfigError(f"its dtype is {stored}, which cannot be read. Save it as one of {', '.join(_DTYPES)}.")
        return np.dtype(_DTYPES[stored])


def _checked(entry: Any) -> Any:
    """What a header says of a tensor, if that can be: NumPy counts bytes in 63 bits."""
    sizes = [*entry["shape"], *entry["data_offsets"]]
    if not all(type(each) is int and 0 <= each < 1 << 48 for each in sizes) or len(entry["data_offsets"]) != 2:
        raise ValueError(f"its shape is {entry['shape']!r} at bytes {entry['data_offsets']!r}")
    if math.prod(map(float, entry["shape"])) > 1 << 50 or not isinstance(entry["dtype"], str):
        raise ValueError(f"{entry['shape']!r} of {entry['dtype']!r} is larger than any tensor")
    return entry
