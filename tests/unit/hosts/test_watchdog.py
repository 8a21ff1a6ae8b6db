"""How a single process ends: run_main and the watchdog, each in a process of its own."""

import os
import subprocess
import sys
import time

from lockstep import exit_codes
from lockstep.hosts import Hosts, MemoryClient, Watchdog

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


def test_watchdog_reports_and_ends():
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", WATCHED], env=env, capture_output=True, text=True)
    assert done.returncode == exit_codes.WATCHDOG
    assert "'decode' on process 0 of 2 did not end within 0.3 s" in done.stderr
    assert "process 0: last phase 'decode 7' 0 s ago" in done.stderr
    assert "process 1: never heard of" in done.stderr
    assert "in slow_device_call" in done.stderr


def test_watchdog_leaves_quick_blocks_alone():
    watchdog = Watchdog(Hosts(*MemoryClient.hub(1)), 0.05)
    for _ in range(5):
        with watchdog.watch("outer"), watchdog.watch("inner"):
            time.sleep(0.02)
        time.sleep(0.06)
    begin = time.perf_counter()
    for _ in range(1000):
        with watchdog.watch("again"):
            pass
    assert (time.perf_counter() - begin) / 1000 < 1e-3


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
