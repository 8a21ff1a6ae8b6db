"""Processes are numbered as JAX's devices are; numbers that do not fit together are refused on every process."""

import pytest

from lockstep.errors import HostError, HostTimeoutError
from lockstep.hosts.numbering import number_processes
from tests.multiprocess.harness import run_threads

PROCESSES = [2, 0, 1]
"""The process of each task."""


def numbered(hosts):
    number_processes(hosts, PROCESSES[hosts.client.task], 3, 5.0)
    return hosts


def leader_broadcasts(hosts):
    numbered(hosts)
    got = hosts.broadcast("v", f"task {hosts.client.task}".encode() if hosts.is_leader else None)
    rows = hosts.gather("rows", f"task {hosts.client.task}".encode())
    hosts.barrier("end")
    return hosts.index, got, rows


def test_the_leader_is_process_0_of_jax_and_rows_come_in_the_order_of_its_processes():
    results = run_threads(leader_broadcasts, 3)
    assert [index for index, *_ in results] == PROCESSES
    assert [got for _, got, _ in results] == [b"task 1"] * 3
    assert [rows for *_, rows in results] == [None, [b"task 1", b"task 2", b"task 0"], None]


def differs(hosts):
    numbered(hosts)
    with pytest.raises(HostError) as caught:
        hosts.agree("x", {"value": str(hosts.index == 2)})
    return str(caught.value)


def test_errors_name_the_processes_of_jax():
    (text,) = set(run_threads(differs, 3))
    assert "processes 0, 1 (the majority): 'False'; process 2: 'True'" in text


def waits(hosts):
    numbered(hosts)
    if hosts.index == 0:
        return ""
    hosts.timeout_s = 0.2
    with pytest.raises(HostTimeoutError, match="Missing: process 0 ") as caught:
        hosts.barrier("x")
    return str(caught.value.__cause__)


def test_the_words_of_the_service_are_explained():
    last, nobody, middle = run_threads(waits, 3)
    assert nobody == "" and "without tasks [1]" in last
    assert (
        "(The service counts otherwise: its task 0 is process 2, task 1 is process 0, task 2 is process 1.)" in middle
    )


@pytest.mark.parametrize(
    ("indices", "counts", "text"),
    [
        (
            [0, 0, 0],
            [3, 3, 3],
            r"jax.process_index\(\) is \[0, 0, 0\] on the processes 0 to 2 of the coordination serv",
        ),
        ([0, 1, 3], [3, 3, 3], r"must be another number from 0 on each"),
        ([0, 1, 0], [3, 3, 1], r"connected 3 processes, but .*: 3 by processes 0, 1; 1 by process 2\. Such devices"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_on_every_process(indices, counts, text):
    def number(hosts):
        task = hosts.client.task
        with pytest.raises(HostError, match=text) as caught:
            number_processes(hosts, indices[task], counts[task], 5.0)
        assert caught.value.on_every_process
        return str(caught.value)

    assert len(set(run_threads(number, 3))) == 1


def test_numbers_are_taken_over_again_after_an_earlier_numbering():
    def twice(hosts):
        numbered(hosts)
        hosts.client.index = PROCESSES[hosts.client.task]  # as `current` does before `start`
        return numbered(hosts).index

    assert run_threads(twice, 3) == PROCESSES
