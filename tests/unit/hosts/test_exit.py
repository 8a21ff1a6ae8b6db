"""How an error that nothing catches ends the job."""

import json
import sys
import time

import pytest

from lockstep.errors import CapacityError, DisagreementError
from lockstep.exits import FAULT, FAULT_AGAIN, PEER_FAILED
from lockstep.hosts import Hosts, MemoryClient, closing_on_leader, exit, fault, peers
from lockstep.hosts.heartbeat import Heartbeat
from lockstep.hosts.peers import ANNOUNCEMENTS
from tests.multiprocess.harness import run_threads


def test_without_run_main_an_uncaught_error_ends_the_job_and_an_interactive_python_goes_on(monkeypatch):
    seen, error = [], CapacityError("a request of 900 tokens never fits")

    def hook(kind, error, trace):
        seen.append(error)

    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(exit, "leave", lambda hosts, code, reason: seen.append((code, reason)))
    restore = exit.end_job_on_uncaught_errors(Hosts(*MemoryClient.hub(1)))
    sys.excepthook(CapacityError, error, None)
    assert seen == [error, (1, "a request of 900 tokens never fits")]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(CapacityError, error, None)
    assert seen[2:] == [error]
    restore()
    assert sys.excepthook is hook


@pytest.mark.parametrize("error", [None, DisagreementError("settings differ")])
def test_the_others_wait_until_the_leader_has_closed_what_is_open(error):
    """They would leave with the error of all, and end the leader in the midst of it."""
    closed = []

    def body(hosts):
        def close():
            time.sleep(0.2)
            closed.append(hosts.index)

        try:
            with closing_on_leader(hosts, close):
                if error is not None:
                    raise error
        except DisagreementError as caught:
            assert caught is error
        assert closed == [0]

    run_threads(body, 2)


def test_an_error_of_its_own_does_not_make_the_leader_wait():
    def body(hosts):
        closed = []
        with pytest.raises(KeyboardInterrupt), closing_on_leader(hosts, lambda: closed.append(hosts.index)):
            raise KeyboardInterrupt
        assert closed == [0] * hosts.is_leader

    run_threads(body, 2)


@pytest.mark.parametrize(("saved", "code"), [(True, PEER_FAILED), (False, FAULT_AGAIN)])
def test_a_fault_while_a_process_is_silent_names_it_here_and_to_the_others(saved, code, monkeypatch, capfd):
    """gloo gave up 10 s before JAX, in its own words, and a survivor ended with 93."""
    clients = MemoryClient.hub(3)
    hosts, ends = Hosts(clients[1]), []
    Heartbeat(clients[2])._post(time.time() - 30)
    monkeypatch.setattr(exit, "end_process", ends.append)
    monkeypatch.setattr(peers, "GRACE_S", -1.0)  # no other process is there that would leave before the leader
    monkeypatch.setenv(fault.RESTARTS, "1")
    if saved:
        hosts.note_saved()
    exit.leave(hosts, FAULT, "JaxRuntimeError: UNKNOWN: GetKeyValue() timed out")
    missing = "Missing: process 2 (last phase 'started' 0 s ago, no sign of life for 30 s)."
    assert ends == [code]
    assert f"lockstep: process 1 of 3 ends because of that fault. {missing}\n" in capfd.readouterr().err
    reason, _, _ = json.loads(clients[0].peek(f"{ANNOUNCEMENTS}/1"))
    assert reason == f"failed: {missing} JaxRuntimeError: UNKNOWN: GetKeyValue() timed out"
    exit.leave(Hosts(clients[0]), FAULT, "HostError: failed. Missing: process 2.")
    assert ends == [code, PEER_FAILED] and capfd.readouterr().err == "", "its own error has named it"


def test_a_fault_while_all_live_is_a_fault(monkeypatch):
    clients = MemoryClient.hub(2)
    ends = []
    monkeypatch.setattr(exit, "end_process", ends.append)
    monkeypatch.setattr(exit, "announce_exit", lambda client, reason, *rest: ends.append(reason))
    monkeypatch.setattr(Hosts, "missing", lambda hosts: "")
    exit.leave(Hosts(clients[1]), FAULT, "JaxRuntimeError: INTERNAL: ICI")
    assert ends == ["JaxRuntimeError: INTERNAL: ICI", FAULT]
