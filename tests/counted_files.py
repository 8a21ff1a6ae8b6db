"""A file system that counts what is read from the local disk, and can be slow, hang or fail: ``counted:///path``."""

import threading
import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lockstep import urls


class CountedFiles(LocalFileSystem):
    """The local disk, counted; one for each thread or process that imports this module."""

    protocol = "counted"
    reads: list[tuple[str, int]] = []
    """Path and bytes of each request."""
    _lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return LocalFileSystem._strip_protocol(path.removeprefix(f"{cls.protocol}://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if end is not None:
            self.before_read()
        data = super().cat_file(path, start, end, **options)
        with self._lock:
            self.reads.append((path, len(data)))
        return data

    def before_read(self) -> None:
        """Called before each request for a part of a file."""

    @classmethod
    def bytes_read(cls) -> int:
        """The bytes read so far, and forgets them."""
        with cls._lock:
            total = sum(size for _, size in cls.reads)
            cls.reads.clear()
        return total


class SlowFiles(CountedFiles):
    """The local disk behind a slow line, which takes one request at a time: ``slow:///path``."""

    protocol = "slow"
    reads: list[tuple[str, int]] = []
    seconds = 0.12
    """That a request takes."""
    line = threading.Lock()

    def before_read(self) -> None:
        with SlowFiles.line:
            time.sleep(SlowFiles.seconds)


class HangingFiles(CountedFiles):
    """The local disk, which after four requests answers nothing until ``go_on`` is set: ``hanging:///path``."""

    protocol = "hanging"
    reads: list[tuple[str, int]] = []
    go_on = threading.Event()

    def before_read(self) -> None:
        if len(HangingFiles.reads) > 4:
            HangingFiles.go_on.wait(60)


for each in (CountedFiles, SlowFiles, HangingFiles):
    fsspec.register_implementation(each.protocol, each, clobber=True)
    # Users cannot add a protocol: it would read files in a way of its own.
    vars(urls)["PROTOCOLS"] = (*urls.PROTOCOLS, each.protocol)
