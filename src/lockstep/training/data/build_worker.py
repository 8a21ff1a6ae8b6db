"""The thread that builds this host's chunks while the main thread hears of the other hosts."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from lockstep.errors import HostTimeoutError
from lockstep.training.data.cache_plan import CachePlan
from lockstep.training.data.chunk_builder import ChunkBuilder, read_chunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A chunk to build.

    Args:
        plan: The cache that it is of.
        directory: The directory of that cache.
        number: The number of the chunk.
    """

    plan: CachePlan
    directory: str
    number: int

    @property
    def size(self) -> int:
        """The bytes to read."""
        pieces = self.plan.chunks[self.number]
        return sum(self.plan.files[number].size // parts for number, _, parts in pieces)


class BuildWorker:
    """A context manager that builds chunks one after the other in a thread; complete ones are left as they are.

    The thread ends with the context, at the next batch of records, which is waited for some seconds; it does not keep
    the interpreter alive.

    Args:
        jobs: The chunks.
        fs: The file system of the caches.
        tokenizer: The tokenizer, which nobody else may use meanwhile.
        raise_at_bad_row: Whether a bad row is an error.
        timeout_s: The seconds in which something must be read.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        fs: Any,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        raise_at_bad_row: bool,
        timeout_s: float,
    ) -> None:
        self._jobs, self._fs, self._tokenizer = jobs, fs, tokenizer
        self._raise, self._timeout_s = raise_at_bad_row, timeout_s
        self.bytes_read = 0
        """The bytes read so far, those of complete chunks included."""
        self.n_bad = 0
        """The bad rows found so far."""
        self._thread = threading.Thread(target=self._run, name="lockstep-data", daemon=True)
        self._changed = threading.Condition()
        self._done, self._closed = False, False
        self._builder: ChunkBuilder | None = None
        self._first_bad: ChunkBuilder | None = None
        self._error: BaseException | None = None
        self._what, self._last = "the first file", time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
        self._thread.join(END_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all chunks are built, or for some seconds.

        Args:
            timeout_s: The most seconds to wait.

        Returns:
            Whether all are built.

        Raises:
            HostTimeoutError: Nothing has been read for the worker's ``timeout_s``; names the file.
            Exception: What building raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            if not self._done and time.monotonic() - self._last > self._timeout_s:
                raise HostTimeoutError(
                    f"nothing of {self._what} was read for {self._timeout_s:g} s. Check the disk, or the network and "
                    "the access to the bucket, or raise timeout_s."
                )
            return self._done

    def first_bad(self) -> str:
        """Name the first bad row that this host has found; empty where it found none itself."""
        return "" if self._first_bad is None else self._first_bad.first_bad()

    def _run(self) -> None:
        try:
            for job in self._jobs:
                before = self.bytes_read
                self._what = job.plan.files[job.plan.chunks[job.number][0][0]].path
                chunk = read_chunk(self._fs, job.directory, job.number)
                if chunk is None:
                    builder = ChunkBuilder(job.plan, job.number, raise_at_bad_row=self._raise, progress=self._note)
                    self._builder = builder
                    builder.build(self._fs, job.directory, self._tokenizer)
                else:
                    self.n_bad += chunk["n_bad"]
                self._note(before + job.size - self.bytes_read, 0, self._what)
            self._finish(None)
        except BaseException as error:
            self._finish(error)

    def _note(self, n_bytes: int, n_bad: int, what: str) -> None:
        if self._closed:
            raise InterruptedError("nobody waits for the cache any more")
        self.bytes_read += n_bytes
        self.n_bad += n_bad
        if n_bad and self._first_bad is None:
            self._first_bad = self._builder
        self._what, self._last = what, time.monotonic()

    def _finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._done, self._error = error is None, error
            self._changed.notify_all()
