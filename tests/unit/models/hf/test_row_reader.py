"""Rows are read in ranges, by several threads."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from lockstep.errors import HostTimeoutError
from lockstep.models.hf import row_reader
from lockstep.models.hf.row_reader import ParallelReader, Request, _ranges
from tests.clock import Clock


@pytest.mark.parametrize("most", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "devices", [[(0, 5), (5, 10)], [(5, 10), (0, 5)], [(0, 4), (4, 4), (8, 20)], [(3, 4)], [(2, 2)], []]
)
def test_ranges_have_every_row_once_and_are_as_few_as_can_be(devices: list[tuple[int, int]], most: int) -> None:
    ranges = list(_ranges(devices, most))
    got = {
        (rows.block, rows.offset + row - rows.start): row
        for parts in ranges
        for rows in parts
        for row in range(rows.start, rows.stop)
    }
    expected = {(block, row - start): row for block, (start, stop) in enumerate(devices) for row in range(start, stop)}
    assert got == expected and sum(rows.stop - rows.start for parts in ranges for rows in parts) == len(expected)
    for parts in ranges:
        assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
        assert parts[-1].stop - parts[0].start <= most
    runs, last = [], None
    for row in sorted(expected.values()):
        runs[-1:] = [runs[-1] + 1] if row - 1 == last else [*runs[-1:], 1]
        last = row
    assert len(ranges) == sum(-(-run // most) for run in runs)


@dataclasses.dataclass(eq=False)
class Job:
    """Requests of one byte each."""

    requests: int
    nbytes: int = 1
    run: Callable[[], None] = lambda: None
    begun: bool = False

    def begin(self) -> Iterator[Request]:
        self.begun = True
        return iter([Request(nbytes=1, what="tensor t in f", run=self.run) for _ in range(self.requests)])


def test_jobs_are_complete_in_order_and_those_without_a_request_too() -> None:
    jobs = [Job(0), Job(20), Job(0), Job(0), Job(3)]
    with ParallelReader(jobs, limit=100, timeout_s=60) as reader:
        done = 0
        while done < len(jobs):
            done = reader.wait(done, 60)
    assert reader.bytes_read == 23 and all(job.begun for job in jobs)


def test_a_job_begins_when_there_is_memory_and_a_large_one_alone() -> None:
    jobs = [Job(1, 6), Job(1, 4), Job(1, 1), Job(1, 50), Job(1, 1)]
    with ParallelReader(jobs, limit=10, timeout_s=60) as reader:
        assert reader.wait(1, 60) == 2 and reader.wait(2, 0.05) == 2
        reader.release(jobs[0])
        assert reader.wait(2, 60) == 3 and reader.wait(3, 0.05) == 3
        reader.release(jobs[1])
        assert not jobs[3].begun and reader.wait(3, 0.05) == 3
        reader.release(jobs[2])
        assert reader.wait(3, 60) == 4 and not jobs[4].begun
        reader.release(jobs[3])
        assert reader.wait(4, 60) == 5


def test_the_first_error_ends_all_of_them() -> None:
    def fail() -> None:
        raise OSError("no such key")

    with ParallelReader([Job(2), Job(9, run=fail), Job(2)], limit=1, timeout_s=60) as reader:
        assert reader.wait(0, 60) == 1
        reader.release(Job(0))
        with pytest.raises(OSError, match="no such key"):
            reader.wait(1, 60)


def test_what_does_not_come_is_named_and_what_comes_slowly_is_waited_for() -> None:
    clock = Clock()

    def slow() -> None:
        clock.now += 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reader, "time", clock)
        with ParallelReader([Job(100, run=slow)], limit=1, timeout_s=50) as reader:
            assert reader.wait(0, 3600) == 1, "each request is in time; all of them took 100 s"
    never = threading.Event()
    with ParallelReader([Job(1), Job(1, run=lambda: never.wait(600) and None)], limit=9, timeout_s=0.3) as reader:
        with pytest.raises(HostTimeoutError, match=r"nothing of tensor t in f came for 0\.3 s\..*raise timeout_s"):
            reader.wait(1, 60)
    never.set()


def test_waiting_for_the_other_hosts_is_not_a_stall() -> None:
    with ParallelReader([Job(1), Job(1)], limit=1, timeout_s=1) as reader:
        assert reader.wait(0, 60) == 1
        assert reader.wait(1, 1.5) == 1, "the second waits for memory"
