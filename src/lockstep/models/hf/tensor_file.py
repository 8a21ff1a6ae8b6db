"""A file of tensors in the format of safetensors: its header is read once, then ranges of rows."""

import math
from collections.abc import Sequence, Set
from typing import Any

import ml_dtypes
import numpy as np

from lockstep.errors import ConfigError
from lockstep.json_text import parse_json, pointer_text, refused
from lockstep.limits import HEADER_BYTES

_LENGTH_BYTES = 8
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
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

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of a tensor as the format spells it, such as ``BF16``."""
        return str(self._tensors[name]["dtype"])

    def row_bytes(self, name: str, columns: Sequence[int] | None = None) -> int:
        """Return the bytes of a row of a tensor.

        Args:
            columns: The shape of a row; None for that of an entry of the first dimension.

        Raises:
            ConfigError: The tensor has a dtype that NumPy does not know.
        """
        columns = self.shape(name)[1:] if columns is None else columns
        return math.prod(columns) * self._dtype(name).itemsize

    def read(self, name: str, start: int, stop: int, columns: Sequence[int] | None = None) -> np.ndarray:
        """Read the rows from ``start`` to ``stop`` of a tensor, in its stored dtype, in one request.

        Args:
            columns: The shape of a row; None for that of an entry of the first dimension.

        Raises:
            ConfigError: The file ends before the rows do, or the tensor has a dtype that NumPy does not know.
        """
        columns = self.shape(name)[1:] if columns is None else columns
        dtype, row = self._dtype(name), self.row_bytes(name, columns)
        first = self._data + self._tensors[name]["data_offsets"][0]
        data = self._filesystem.cat_file(self._path, start=first + start * row, end=first + stop * row)
        if len(data) != (stop - start) * row:
            raise ConfigError(
                f"{len(data)} bytes came where {(stop - start) * row} were asked for: the file is shorter than its "
                "header says. Download or upload it again."
            )
        return np.frombuffer(data, dtype).reshape(stop - start, *columns)

    def check_size(self) -> None:
        """Compare the size of the file with its header.

        Raises:
            ConfigError: The file is shorter, such as one that was not downloaded whole.
        """
        size = self._filesystem.size(self._path)
        end = self._data + max((entry["data_offsets"][1] for entry in self._tensors.values()), default=0)
        if size is not None and size < end:
            raise ConfigError(f"it has {size:,} bytes and needs {end:,} by its header. Download or upload it again.")

    def stored_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in the file, whatever its dtype."""
        start, end = self._tensors[name]["data_offsets"]
        return max(0, end - start)

    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        """Read bytes of a tensor, whatever its dtype, in one request; fewer where it ends before."""
        begin, end = (self._data + offset for offset in self._tensors[name]["data_offsets"])
        data: bytes = self._filesystem.cat_file(self._path, start=begin + start, end=min(begin + start + count, end))
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
    if length == int.from_bytes(b"version ", "little") and (text := pointer_text(filesystem.cat_file(path, end=100))):
        raise ConfigError(f"it {text}")
    if not 0 < length <= HEADER_BYTES:
        raise ConfigError(f"its header would have {length} bytes. Save or upload it again.")
    header: bytes = filesystem.cat_file(path, start=_LENGTH_BYTES, end=_LENGTH_BYTES + length)
    return header


def _checked(entry: Any) -> Any:
    """The entry of a tensor in a header, checked: NumPy counts bytes in 63 bits."""
    sizes = [*entry["shape"], *entry["data_offsets"]]
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes) or len(entry["data_offsets"]) != 2:
        raise ValueError(f"its shape is {entry['shape']!r} at bytes {entry['data_offsets']!r}")
    if math.prod(map(float, entry["shape"])) > 1 << 50 or not isinstance(entry["dtype"], str):
        raise ValueError(f"{entry['shape']!r} of {entry['dtype']!r} is larger than any tensor")
    return entry
