"""Rows are read in ranges, by several threads."""

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import numpy as np
import pytest
from jax.sharding import Mesh

from lockstep.errors import HostTimeoutError
from lockstep.models.families.registry import PRESETS, family_of
from lockstep.models.hf import row_reader
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.load import _sharding
from lockstep.models.hf.names import parameters, stored_shapes
from lockstep.models.hf.row_layout import ReadingHosts, RowLayout
from lockstep.models.hf.row_reader import ParallelReader, ParameterRead, Request, _ranges
from lockstep.models.trainable import skeleton
from lockstep.placement import PARAMETER_AXES, make_mesh
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


@dataclasses.dataclass(frozen=True)
class Device:
    """A chip of a pod, four to a host."""

    id: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5"


def mesh_of_hosts(hosts: int, shape: str = "auto") -> Mesh:
    return make_mesh(shape, [Device(number, number // 4) for number in range(4 * hosts)])


@pytest.mark.parametrize(("shape", "now", "before"), [("auto", 297, 291), ("host_local", 684, 678)])
def test_at_256_hosts_32_read_with_an_eighth_of_the_requests(shape: str, now: int, before: int) -> None:
    """Llama-3.1-8B, stored in bfloat16, for a v5p-2048: what a group of eight hosts asks of the bucket.

    With ``auto``, all 32 groups make 9,504 requests where each host for itself made 74,494: the last have
    no row of the embedding.
    """
    mesh, preset = mesh_of_hosts(256, shape), PRESETS["llama-3.1-8b"]
    expected = parameters(skeleton(preset.vocab_size, preset.config), family_of(preset.config).tensors)
    shapes = stored_shapes(expected)
    files = Mock(CheckpointFiles, directory="gs://bucket/llama", row_bytes=lambda name: 2 * math.prod(shapes[name][1:]))
    layouts = [RowLayout.of(each, _sharding(each, mesh, PARAMETER_AXES)) for each in expected]

    def asked(readers: ReadingHosts | None, host: int) -> list[int]:
        pairs = zip(expected, layouts, strict=True)
        reads = [ParameterRead(files, *each, np.dtype("float32"), readers, host) for each in pairs]
        return [request.nbytes for read in reads for request in read.requests()]

    groups = ReadingHosts.of(mesh)
    for group in (range(8), range(128, 136)):
        first, *others = (asked(groups, host) for host in group)
        alone = [asked(None, host) for host in group]
        assert not any(others) and len(first) == now and [len(each) for each in alone] == [before] * 8
        assert sum(first) == sum(map(sum, alone)) > 2 * sum(map(math.prod, shapes.values())) // 33


@pytest.mark.parametrize(
    ("hosts", "readers"), [(32, None), (33, 11), (48, 24), (64, 32), (96, 32), (256, 32), (2304, 32), (37, None)]
)
def test_the_most_hosts_read_that_share_the_others_evenly(hosts: int, readers: int | None) -> None:
    found = ReadingHosts.of(mesh_of_hosts(hosts))
    assert (found and found.mesh.shape["group"]) == readers
    if found:
        first = found.mesh.devices[1]
        assert [[each.process_index for each in row] for row in first[:, :1]] == [
            [found.hosts + number] for number in range(found.hosts)
        ]
        assert found.served(first[0, 2]) == [row[2] for row in first] and not found.served(first[1, 2])


def test_hosts_with_unequal_devices_all_read() -> None:
    devices = [Device(number, number // 4) for number in range(4 * 64 - 1)]
    assert ReadingHosts.of(make_mesh("auto", devices)) is None


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


def no_job_begins(reader: ParallelReader) -> bool:
    """Whether there is no room for the next job: a thread that looked for one would find none."""
    with reader._changed:
        return not reader._begins_next()


def test_a_job_begins_when_there_is_memory_and_a_large_one_alone() -> None:
    jobs = [Job(1, 6), Job(1, 4), Job(1, 1), Job(1, 50), Job(1, 1)]
    with ParallelReader(jobs, limit=10, timeout_s=60) as reader:
        assert reader.wait(1, 60) == 2 and no_job_begins(reader)
        reader.release(jobs[0])
        assert reader.wait(2, 60) == 3 and no_job_begins(reader)
        reader.release(jobs[1])
        assert no_job_begins(reader)
        reader.release(jobs[2])
        assert reader.wait(3, 60) == 4 and no_job_begins(reader)
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
