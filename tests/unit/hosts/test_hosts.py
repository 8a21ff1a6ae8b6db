"""Host logic between threads with the in-memory client: the bodies that tests/multiprocess runs between processes."""

import signal
import sys

import pytest

from lockstep.engine import Gate
from lockstep.errors import HostTimeoutError, PeerError
from lockstep.hosts import Hosts, MemoryClient, current, ready_on_all
from lockstep.hosts.hosts import JAX_NOTICE, LOOK_S, Preemption
from lockstep.types import FinishReason
from tests.clock import Clock
from tests.multiprocess.harness import run_threads
from tests.multiprocess.host_bodies import BEHAVIOURS

WAIT_S = 0.2


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_between_threads(behaviour):
    """Four threads; tests/multiprocess/test_hosts.py has two."""
    body, check = BEHAVIOURS[behaviour]
    check(run_threads(body, 4, WAIT_S), WAIT_S)


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


def test_a_process_that_failed_and_waits_in_vain_says_why():
    hosts = Hosts(MemoryClient.hub(2)[0], timeout_s=0.1)
    with pytest.raises(HostTimeoutError, match="This process had failed before: ValueError: no prompts"):
        with hosts.run_on_all("prepare"):
            raise ValueError("no prompts")


def test_what_fails_in_a_job_of_ones_own_is_told_to_the_others():
    def body(hosts):
        with pytest.raises(PeerError) as caught, hosts.run_on_all("outer"):
            if hosts.index == 1:
                with Hosts(*MemoryClient.hub(1)).run_on_all("inner"):
                    raise ValueError("no prompts")
        return str(caught.value)

    one, other = run_threads(body, 2)
    assert one == other and "process 1: PeerError: inner failed: ValueError: no prompts" in one


def test_what_all_have_already_is_not_told_again():
    def body(hosts):
        with pytest.raises(PeerError) as caught, hosts.run_on_all("outer"), hosts.run_on_all("inner"):
            raise ValueError(f"no prompts on {hosts.index}")
        return str(caught.value)

    one, other = run_threads(body, 2)
    assert one == other and "'inner'" in one and "outer" not in one


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


def requested(hosts: Hosts, who: int):
    found = []
    with hosts.scope("round") as scope:
        with scope.run_on_all("before") as before:
            before.share(hosts.preemption.requested())
        found.append(any(before.shared))
        scope.barrier("nobody has noted")
        if hosts.index == who:
            hosts.preemption.note(signal.SIGTERM)
        with scope.run_on_all("after") as after:
            after.share(hosts.preemption.requested())
        found.append(any(after.shared))
        hosts.preemption.clear()
        found.append(hosts.preemption.requested())
        scope.barrier("end")
    return found


def test_a_signal_on_any_process_is_known_to_all():
    for who in range(3):
        assert run_threads(requested, 3, who) == [[False, True, False]] * 3


def aborts(hosts: Hosts, who: int):
    if hosts.index == who:
        hosts.client.set(JAX_NOTICE, b"2026-11-20")  # what JAX's preemption service sets on a SIGTERM
    hosts.barrier("noted")
    with hosts.scope("round") as scope:
        gate = Gate(scope)
        found = [gate(None, done=True), gate.preempted, gate(None), gate.preempted]
        scope.barrier("end")
    return found


def test_jax_own_notice_aborts_a_run_between_launches():
    assert run_threads(aborts, 3, 2) == [[None, False, FinishReason.CANCELLED, True]] * 3


def test_the_leader_looks_for_the_notice_once_a_second(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sys.modules["lockstep.hosts.hosts"], "time", clock)
    leader, other = MemoryClient.hub(2)
    asked, found = Preemption(leader), []
    assert not asked.requested(), "it looks at once, and next in a second"
    other.set(JAX_NOTICE, b"2026-11-20")
    for clock.now in (0.0, LOOK_S - 0.1, LOOK_S):
        found.append(asked.requested())
    assert found == [False, False, True] and asked.signal == signal.SIGTERM
    clock.now = 0.0
    assert Preemption(leader).requested() and not Preemption(other).requested(), "the leader tells it"
    asked.note(signal.SIGINT)
    assert asked.signal == signal.SIGTERM, "the first one counts"
