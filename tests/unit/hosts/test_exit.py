"""How an error that nothing catches ends the job."""

import sys

from lockstep.errors import CapacityError
from lockstep.hosts import Hosts, MemoryClient, exit


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
