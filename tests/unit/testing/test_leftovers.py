"""What is left behind, in one process; tests/multiprocess/test_pool.py has all kinds of it in several."""

import functools
import sys
import threading
import types

import jax
import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.testing import assert_nothing_left, leftovers
from lockstep.testing.leftovers import forget, package_of_tests


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.1)


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
        monkeypatch.setattr(leftovers, "GROWS", leftovers.GROWS)
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


def test_what_a_test_puts_into_the_project_is_seen_and_what_its_helpers_have_is_not(hosts, monkeypatch, tmp_path):
    helper = types.ModuleType("test_stranger")
    helper.double = types.FunctionType((lambda: 2).__code__, {"__name__": "test_stranger"})
    other, installed = types.ModuleType("trainer"), types.ModuleType("installed")
    other.__file__, installed.__file__ = str(tmp_path / "trainer.py"), jax.__file__
    for module in (helper, other, installed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = leftovers.look(hosts, "test_stranger")
    other.step = installed.step = helper.double
    assert leftovers.left(before, hosts, "test_stranger") == ["replaced trainer:.step: None became 'test_stranger'"]
    assert leftovers.left(before, hosts) == []


def test_caches_of_test_modules_are_emptied(monkeypatch):
    module = types.ModuleType("test_stranger")
    module.model = functools.cache(object)
    monkeypatch.setitem(sys.modules, "test_stranger", module)
    first = module.model()
    forget("another")
    assert module.model() is first
    forget("test_stranger")
    assert module.model() is not first
