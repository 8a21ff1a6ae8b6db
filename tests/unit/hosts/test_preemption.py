"""Requests to end the job, between threads; with real signals: tests/faults."""

import signal
import sys

from lockstep.engine import Gate
from lockstep.hosts import Hosts, MemoryClient
from lockstep.hosts.preemption import JAX_NOTICE, LOOK_S, Preemption
from lockstep.types import FinishReason
from tests.clock import Clock
from tests.multiprocess.harness import run_threads


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
    monkeypatch.setattr(sys.modules["lockstep.hosts.preemption"], "time", clock)
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
