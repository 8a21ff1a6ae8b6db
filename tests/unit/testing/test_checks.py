"""What is left behind, in one process; tests/multiprocess/test_pool.py has all kinds of it in several."""

import functools
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.check import cache_miss_logger
from lockstep.hosts import Hosts, MemoryClient
from lockstep.testing import assert_no_retrace, assert_nothing_left, checks
from lockstep.testing.checks import forget, package_of_tests


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(checks, "PATIENCE_S", 0.1)


@pytest.fixture
def hosts():
    return Hosts(MemoryClient.hub(1)[0])


def test_a_clean_block_passes(hosts):
    with assert_nothing_left(hosts):
        thread = threading.Thread(target=jax.device_put, args=(1.0,))
        thread.start()
        thread.join()


def test_what_is_left_is_named(hosts, monkeypatch):
    end = threading.Event()
    with pytest.raises(AssertionError) as caught, assert_nothing_left(hosts):
        kept = jax.device_put([1.0, 2.0])
        threading.Thread(target=end.wait, name="writer", daemon=True).start()
        monkeypatch.setenv("LEFT", "1")
        hosts.client.set("lockstep/left", b"")
        hosts.client.set("lockstep/heartbeat/9", b"")  # each process has one of these
        monkeypatch.setattr(checks, "GROWS", checks.GROWS)
    end.set()
    assert kept is not None
    assert str(caught.value).splitlines() == [
        "left behind:",
        "  key of the service lockstep/left",
        "  thread writer",
        "  array float32[], 2 of them",
        "  environment variable LEFT: None became '1'",
    ]


def test_the_package_of_the_tests_is_found():
    assert package_of_tests("tests.unit.test_loss") == "tests"
    assert package_of_tests("project.tests.unit.test_loss") == "project.tests"
    assert package_of_tests("test_loss") == "test_loss"
    assert package_of_tests("unit.test_loss") == "unit.test_loss"


@pytest.mark.slow
def test_what_a_test_puts_into_the_project_is_seen_and_what_its_helpers_have_is_not(hosts, monkeypatch, tmp_path):
    helper = types.ModuleType("test_stranger")
    helper.double = types.FunctionType((lambda: 2).__code__, {"__name__": "test_stranger"})
    other, installed = types.ModuleType("trainer"), types.ModuleType("installed")
    other.__file__, installed.__file__ = str(tmp_path / "trainer.py"), jax.__file__
    for module in (helper, other, installed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = checks.look(hosts, "test_stranger")
    other.step = installed.step = helper.double
    assert checks.left(before, hosts, "test_stranger") == ["replaced trainer:.step: None became 'test_stranger'"]
    assert checks.left(before, hosts) == []


def test_caches_of_test_modules_are_emptied(monkeypatch):
    module = types.ModuleType("test_stranger")
    module.model = functools.cache(object)
    monkeypatch.setitem(sys.modules, "test_stranger", module)
    first = module.model()
    forget("another")
    assert module.model() is first
    forget("test_stranger")
    assert module.model() is not first


@jax.jit
def scaled(batch, factor):
    return batch * factor


def test_the_same_shapes_pass():
    batch = np.ones((3, 5), np.float32)
    scaled(batch, 2.0)
    with assert_no_retrace():
        scaled(2 * batch, 3.0)


def test_another_shape_is_named_with_the_argument_that_changed():
    scaled(np.ones((3, 5), np.float32), 2.0)
    with pytest.raises(AssertionError) as caught, assert_no_retrace():
        scaled(np.ones((4, 5), np.float32), 2.0)
    text = str(caught.value)
    assert text.startswith("compiled inside: jit(scaled). Call each program once before"), text
    assert "batch" in text and "f32[4,5]" in text and "f32[3,5]" in text, text


def test_a_function_that_is_made_anew_at_each_step_is_found():
    def step():
        return jax.jit(lambda x: x + 1)(1.0)

    step()
    with pytest.raises(AssertionError, match=r"compiled inside: jit\(<lambda>\)"), assert_no_retrace():
        step()


def test_a_first_eager_operation_is_found_and_the_next_is_not():
    with pytest.raises(AssertionError, match="compiled inside: "), assert_no_retrace():
        jnp.ones((7, 3, 1, 2)).sum()
    with assert_no_retrace():
        jnp.ones((7, 3, 1, 2)).sum()


def test_nothing_of_it_stays_and_errors_pass_through():
    logger = cache_miss_logger()
    before = (list(logger.handlers), logger.propagate, jax.config.jax_explain_cache_misses)
    with pytest.raises(KeyError), assert_no_retrace():
        raise KeyError
    assert (list(logger.handlers), logger.propagate, jax.config.jax_explain_cache_misses) == before
