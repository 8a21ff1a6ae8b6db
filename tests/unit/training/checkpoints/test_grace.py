"""Storage that is asked whether it still answers, once the time that SIGTERM leaves is over."""

import math
import signal
import threading

import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.training.checkpoints import grace


class File:
    """A file of a storage that answers, hangs until the test ends, or fails."""

    def __init__(self, go, error=None):
        self._go, self._error, self.reads = go, error, 0

    def __truediv__(self, name):
        return self

    def read_bytes(self):
        self.reads += 1
        self._go.wait()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("silent", [False, True])
def test_a_silent_storage_is_found_once_the_time_is_over_and_not_before(monkeypatch, silent):
    go = threading.Event()
    file = File(go)
    if not silent:
        go.set()
    monkeypatch.setattr(grace, "ANSWER_S", 0.05 if silent else 60.0)
    hosts = Hosts(*MemoryClient.hub(1))
    time_left = grace.Grace(0.0, file, hosts)
    assert time_left.probe_at == math.inf and not time_left.probe() and not file.reads, "nobody asked the run to end"
    hosts.preemption.note(signal.SIGTERM)
    assert time_left.age_s() >= 0.0
    assert time_left.probe() is silent and time_left.probe() is silent and file.reads == 1
    go.set()


def test_a_storage_that_fails_has_not_answered():
    go = threading.Event()
    go.set()
    assert not grace.answers(File(go, ConnectionResetError("gone")), 0.05) and grace.answers(File(go), 60.0)
