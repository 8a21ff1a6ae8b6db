"""Leader-only work cannot launch; it can read and work on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import LaunchMismatchError
from lockstep.hosts import leader_only, try_leader_only

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
