"""A host's own work in a thread: its end, its errors, and work that does not move."""

import threading

import pytest

from lockstep.errors import HostTimeoutError
from lockstep.hosts import HostThread, host_thread


class Counting(HostThread):
    """Counts up to a number, one step at each turn of ``gate``."""

    def __init__(self, steps, timeout_s=60.0, error=None):
        super().__init__("counting", timeout_s)
        self.steps, self.error, self.count = steps, error, 0
        self.gate = threading.Semaphore(0)

    def _work(self):
        for _ in range(self.steps):
            self.gate.acquire()
            self._raise_if_stopped()
            self.count += 1
            self._end_step()
        if self.error:
            raise self.error

    def _stall(self):
        return "nothing was counted"


def test_it_is_waited_for_some_seconds_and_then_until_it_is_done():
    with Counting(2) as thread:
        thread.gate.release()
        assert not thread.wait(0.05)
        thread.gate.release()
        assert thread.wait(20.0) and thread.count == 2


def test_what_it_raises_is_raised_by_each_wait():
    with Counting(0, error=OSError("no space left on device")) as thread:
        for _ in range(2):
            with pytest.raises(OSError, match="no space left"):
                thread.wait(20.0)


def test_after_the_context_it_does_nothing_more():
    with Counting(5) as thread:
        thread._stopped = True  # by stop(), which then waits for the step that begins here
        thread.gate.release(5)
    assert not thread._thread.is_alive() and thread.count == 0
    assert not thread.wait(0.0), "it was given up, and that is no error"


def test_a_step_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(host_thread, "STOP_S", 0.05)
    with Counting(1, timeout_s=0.1) as thread:
        with pytest.raises(HostTimeoutError, match=r"nothing was counted for 0\.1 s. Check the disk"):
            thread.wait(0.2)
        thread.gate.release()
