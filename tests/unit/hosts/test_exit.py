"""How an error that nothing catches ends the job."""

import sys
import time

import pytest

from lockstep.errors import CapacityError, DisagreementError
from lockstep.hosts import Hosts, MemoryClient, closing_on_leader, exit
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
