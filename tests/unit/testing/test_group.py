"""Threads that stand for processes; tests/multiprocess/test_pool.py has processes."""

import threading

from lockstep.testing import run_threads


def test_threads_launch_at_the_same_time_though_jax_has_one_guard_for_all():
    together = threading.Barrier(2)

    def body(hosts):
        with hosts.launch_on_all("first"):
            together.wait(5)  # the other thread is in its block too
        with hosts.launch_on_all("again"):
            together.wait(5)
        return hosts.index

    assert run_threads(body, 2) == [0, 1]
