"""A stream of what is compressed with zstandard, in bounded memory."""

import io
from typing import Any, ClassVar

import zstandard


class ZstdStream(io.RawIOBase):
    """A compressed file of any number of frames. The readers of zstandard take one that was cut for one that ends.

    Raises:
        EOFError: The file ends within a frame.
    """

    INPUT_BYTES: ClassVar = 1 << 10  # bytes that are decompressed at once; four of them can be 128 KiB

    def __init__(self, file: Any) -> None:
        self._file = file
        self._frame: Any = None
        self._compressed, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output and (self._compressed or self._read()):
            frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(frame.decompress(self._compressed))
            self._compressed, self._frame = frame.unused_data, None if frame.eof else frame
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size

    def _read(self) -> bool:
        self._compressed = self._file.read(self.INPUT_BYTES)
        if not self._compressed and self._frame is not None:
            raise EOFError("compressed file ended before the end of a frame; it may be half a download")
        return bool(self._compressed)
