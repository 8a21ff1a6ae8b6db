"""Leader-only work cannot launch; it can read and work on the host."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import HostTimeoutError, LaunchMismatchError
from lockstep.hosts import HostThread, leader_only, own_work, try_leader_only

X = np.arange(4.0)


def launches():
    cached = jax.jit(lambda x: x * 2)
    x = jax.device_put(X)
    cached(x), cached(x)
    compiled = jax.jit(lambda x: x * 3).lower(x).compile()
    compiled(x)
    return {
        "cached jit": lambda: cached(x),
        "new jit": lambda: jax.jit(lambda x: x - 1)(x),
        "compiled": lambda: compiled(x),
        "eager": lambda: x + 1,
        "zeros": lambda: jnp.zeros(()),
        "index": lambda: x[0],
        "key": lambda: jax.random.key(0),
    }


@pytest.mark.parametrize("meshed", [False, True])
@pytest.mark.parametrize("name", sorted(launches()))
def test_launch_raises(name, meshed):
    launch = launches()[name]
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    message = "the device program '.*' was launched inside leader-only work.*Use NumPy"

    def leader_work():
        with pytest.raises(LaunchMismatchError, match=message) as caught, leader_only():
            launch()
        assert isinstance(caught.value.__cause__, RuntimeError)
        launch()  # allowed again, and not spoiled

    if meshed:
        with jax.set_mesh(mesh):
            leader_work()
    else:
        leader_work()


def test_reading_and_numpy_are_allowed():
    x = jax.device_put(X)
    with leader_only():
        assert np.asarray(x).sum() == 6.0
        assert np.asarray(jax.device_put(X)).sum() == 6.0


def test_whether_it_succeeded_is_returned_and_a_failure_goes_no_further(caplog):
    assert try_leader_only("writing", lambda: None, "training goes on") and not caplog.text
    assert not try_leader_only("writing", lambda: 1 / 0, "training goes on")
    assert "writing failed on the leader; training goes on: ZeroDivisionError: division by zero" in caplog.text


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="^mine$"), leader_only():
        raise RuntimeError("mine")
    with pytest.raises(KeyError), leader_only():
        raise KeyError("k")


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
    monkeypatch.setattr(own_work, "STOP_S", 0.05)
    with Counting(1, timeout_s=0.1) as thread:
        with pytest.raises(HostTimeoutError, match=r"nothing was counted for 0\.1 s. Check the disk"):
            thread.wait(0.2)
        thread.gate.release()
