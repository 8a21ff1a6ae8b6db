"""What comes before launches of all."""

import pytest

from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient, ready_on_all
from tests.multiprocess.harness import run_threads


def launches(hosts, failing):
    """Which of three launches a process makes, where one process fails before the one of number ``failing``."""
    made, text = [], ""
    try:
        with hosts.scope("loop") as scope:
            for number in range(3):
                with ready_on_all(scope, "before a launch"):
                    if (hosts.index, number) == (1, failing):
                        raise MemoryError("no room for a batch")
                made.append(number)
    except PeerError as error:
        text = str(error)
    return made, text


def test_nobody_launches_after_an_error_on_one_process():
    results = run_threads(lambda hosts: launches(hosts, 1), 3)
    assert results == results[:1] * 3
    made, text = results[0]
    assert made == [0]
    assert text == "1 of 3 processes failed at 'loop#1/before a launch'. process 1: MemoryError: no room for a batch"


def test_all_go_on_where_nothing_fails():
    assert run_threads(lambda hosts: launches(hosts, None), 3) == [([0, 1, 2], "")] * 3


def test_a_single_process_keeps_its_error_as_the_cause():
    with pytest.raises(PeerError, match="before a launch failed: ValueError: odd") as caught:
        with Hosts(*MemoryClient.hub(1)).scope("x") as scope, ready_on_all(scope, "before a launch"):
            raise ValueError("odd")
    assert isinstance(caught.value.__cause__, ValueError)
