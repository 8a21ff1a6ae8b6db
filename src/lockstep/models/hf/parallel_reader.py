"""Reads many ranges of files in a few threads, in order, with bounded memory, and notices when nothing comes."""

import collections
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from lockstep.errors import HostTimeoutError
from lockstep.models.hf.parameter_read import Request

THREADS = 8


class Job(Protocol):
    """Ranges whose memory is needed together, such as a `ParameterRead`."""

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes from its begin until `ParallelReader.release`."""

    def begin(self) -> Iterator[Request]:
        """Allocates the memory and returns what is to be read."""


class ParallelReader:
    """A context manager that reads jobs in their order, several requests at a time.

    A job begins when it and those that are not released yet have at most ``limit`` bytes; a larger one is alone. The
    threads end with the context, or with the request that they are in; they do not keep the interpreter alive.

    Args:
        jobs: The jobs.
        limit: The most bytes of memory.
        timeout_s: The seconds in which at least one of the requests under way must end.
    """

    def __init__(self, jobs: Sequence[Job], *, limit: int, timeout_s: float) -> None:
        self._jobs, self._limit, self._timeout_s = jobs, limit, timeout_s
        self.bytes_read = 0
        """The bytes read so far."""
        self._changed = threading.Condition()
        self._requests: collections.deque[tuple[int, Request]] = collections.deque()
        self._left: list[int] = []  # requests that have not ended, of each job that has begun
        self._in_memory = 0
        self._under_way: list[Request] = []
        self._last_end = time.monotonic()
        self._error: BaseException | None = None
        self._closed = False

    def __enter__(self) -> Self:
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"lockstep-load-{number}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, beyond: int, timeout_s: float) -> int:
        """Waits until more than ``beyond`` jobs are complete, counted from the first, or all, or for some seconds.

        Args:
            beyond: The number of jobs that are known to be complete.
            timeout_s: The most seconds to wait.

        Returns:
            The number of jobs that are complete, counted from the first.

        Raises:
            HostTimeoutError: No request has ended for the reader's ``timeout_s``; names what is being read.
            Exception: What a request raised.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                self._raise_if_stalled()
                complete = next((job for job, left in enumerate(self._left) if left), len(self._left))
                rest = deadline - time.monotonic()
                if complete > beyond or complete == len(self._jobs) or rest <= 0:
                    return complete
                self._changed.wait(min(rest, self._timeout_s / 4))

    def release(self, job: Job) -> None:
        """Counts the memory of a job as free."""
        with self._changed:
            self._in_memory -= job.nbytes
            self._changed.notify_all()

    def _raise_if_stalled(self) -> None:
        if self._under_way and time.monotonic() - self._last_end > self._timeout_s:
            what = ", ".join(dict.fromkeys(request.what for request in self._under_way))
            raise HostTimeoutError(
                f"nothing of {what} came for {self._timeout_s:g} s. Check the disk, or the network and the access to "
                "the bucket, or raise timeout_s."
            )

    def _run(self) -> None:
        try:
            while (taken := self._take()) is not None:
                job, request = taken
                request.run()
                with self._changed:
                    self.bytes_read += request.nbytes
                    self._left[job] -= 1
                    self._under_way.remove(request)
                    self._last_end = time.monotonic()
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> tuple[int, Request] | None:
        """Returns the next request and the number of its job; None when there is none, or never will be."""
        with self._changed:
            while not self._closed and self._error is None:
                while not self._requests and self._begins_next():
                    pass
                if self._requests:
                    if not self._under_way:
                        self._last_end = time.monotonic()
                    job, request = self._requests.popleft()
                    self._under_way.append(request)
                    return job, request
                if len(self._left) == len(self._jobs):
                    return None
                self._changed.wait()
            return None

    def _begins_next(self) -> bool:
        """Begins the next job, if there is one and it fits; returns whether it did."""
        number = len(self._left)
        if number == len(self._jobs):
            return False
        job = self._jobs[number]
        if self._in_memory and self._in_memory + job.nbytes > self._limit:
            return False
        self._in_memory += job.nbytes
        requests = list(job.begin())
        self._requests.extend((number, request) for request in requests)
        self._left.append(len(requests))
        self._changed.notify_all()
        return True
