"""The thread that builds this host's chunks while the main thread hears of the other hosts."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.hosts import HostThread
from lockstep.training.data.cache_plan import CachePlan
from lockstep.training.data.chunk_builder import ChunkBuilder, read_chunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


class BuildWorker(HostThread):
    """A context manager that builds chunks one after the other in a thread; complete ones are left as they are.

    The thread ends with the context, at the next batch of records.

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
        super().__init__("lockstep-data", timeout_s)
        self._jobs, self._fs, self._tokenizer, self._raise = jobs, fs, tokenizer, raise_at_bad_row
        self.bytes_read = 0
        """The bytes read so far, those of complete chunks included."""
        self.n_bad = 0
        """The bad rows found so far."""
        self._builder: ChunkBuilder | None = None
        self._first_bad: ChunkBuilder | None = None
        self._what = "the first file"

    def first_bad(self) -> str:
        """Name the first bad row that this host has found; empty where it found none itself."""
        return "" if self._first_bad is None else self._first_bad.first_bad()

    def _work(self) -> None:
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

    def _stall(self) -> str:
        return f"nothing of {self._what} was read"

    def _note(self, n_bytes: int, n_bad: int, what: str) -> None:
        self._raise_if_stopped()
        self.bytes_read += n_bytes
        self.n_bad += n_bad
        if n_bad and self._first_bad is None:
            self._first_bad = self._builder
        self._what = what
        self._end_step()
