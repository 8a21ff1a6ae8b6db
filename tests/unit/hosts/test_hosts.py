"""Host logic between threads with the in-memory client: the bodies that tests/multiprocess runs between processes."""

import pytest

from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient, current
from tests.multiprocess.harness import run_threads
from tests.multiprocess.host_bodies import BEHAVIOURS

WAIT_S = 0.2


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_between_threads(behaviour, count):
    body, check = BEHAVIOURS[behaviour]
    check(run_threads(body, count, WAIT_S), WAIT_S)


def test_one_process_waits_for_nobody():
    hosts = Hosts(*MemoryClient.hub(1), timeout_s=1.0)
    with hosts.scope("round") as scope:
        scope.phase("alone")
        scope.barrier("start")
        assert scope.broadcast("prompts", b"p") == b"p"
        assert scope.gather("rows", b"r") == [b"r"]
        scope.agree("programs", {"decode": "d"})
        with scope.run_on_all("fine"):
            pass
        with pytest.raises(PeerError, match="^round#1/prepare failed: ValueError: no prompts$"):
            with scope.run_on_all("prepare"):
                raise ValueError("no prompts")
        scope.barrier("end")
    assert hosts.client.get_dir("lockstep/job") == {}
    assert hosts.is_leader and current().count == 1 and current() is current()
