"""How a single process ends: run_main and the watchdog, each in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

from lockstep import exits
from lockstep.hosts import Hosts, MemoryClient, Watchdog
from tests.clock import Clock

module = sys.modules["lockstep.hosts.watchdog"]

WATCHED = """
import time
from lockstep.hosts import Hosts, MemoryClient, Watchdog
hosts = Hosts(MemoryClient.hub(2)[0])
hosts.phase("decode 7")
def slow_device_call():
    time.sleep(30)
with Watchdog(hosts, 0.3).watch("decode"):
    slow_device_call()
"""


@pytest.mark.slow
def test_watchdog_reports_and_ends():
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", WATCHED], env=env, capture_output=True, text=True)
    assert done.returncode == exits.WATCHDOG
    assert "'decode' on process 0 of 2 did not end within 0.3 s" in done.stderr
    assert re.search(r"process 0: last phase 'decode 7' \d+ s ago", done.stderr)
    assert "process 1: never heard of" in done.stderr
    assert "in slow_device_call" in done.stderr


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def ended(monkeypatch):
    """The codes with which the process would have ended."""
    codes = []

    def end(code):
        codes.append(code)
        sys.exit(code)  # which ends the thread

    monkeypatch.setattr(module, "end_process", end)
    return codes


def test_watchdog_leaves_quick_blocks_alone(clock, ended):
    """And a second watch starts no second thread, so that one costs microseconds."""
    watchdog = Watchdog(Hosts(*MemoryClient.hub(1)), 60.0)
    with watchdog.watch("outer"), watchdog.watch("inner"):
        assert clock.until_asleep() == 60.0
        thread = watchdog._thread
        assert thread.daemon, "the process ends without it"
        clock.now = 59.0
    with watchdog.watch("again"):
        assert watchdog._thread is thread
        clock.now = 60.0
        clock.wake()
        assert clock.until_asleep() == 59.0 and watchdog._watched == ("again", 119.0)
    clock.now = 119.0
    clock.wake()
    assert clock.until_asleep() == 60.0
    clock.wake()
    thread.join(60)
    assert watchdog._thread is None and ended == [], "idle: the next watch starts a new one"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_block_that_lasts_its_time_ends_the_process_and_not_before(clock, ended, capfd):
    watchdog = Watchdog(Hosts(*MemoryClient.hub(1)), 60.0)
    with watchdog.watch("decode"):
        clock.until_asleep()
        clock.now = 59.5
        clock.wake()
        assert clock.until_asleep() == 0.5 and ended == []
        clock.now = 60.0
        clock.wake()
        watchdog._thread.join(60)
    assert ended == [exits.WATCHDOG] and "'decode' on process 0 of 1 did not end within 60 s" in capfd.readouterr().err


def test_after_an_inner_block_the_outer_one_is_watched_with_its_own_deadline():
    watchdog = Watchdog(Hosts(*MemoryClient.hub(1)), 60.0)
    with watchdog.watch("outer"):
        outer = watchdog._watched
        with watchdog.watch("inner"):
            assert watchdog._watched[0] == "inner" and watchdog._watched[1] >= outer[1]
        assert watchdog._watched is outer
    assert watchdog._watched is None


def test_a_launch_is_the_phase_that_the_others_see():
    hosts = Hosts(*MemoryClient.hub(1))
    watchdog = Watchdog(hosts, 60.0)
    with watchdog.watch_launch("decode"):
        assert hosts.last_phase == "decode" and watchdog._watched[0] == "decode"
