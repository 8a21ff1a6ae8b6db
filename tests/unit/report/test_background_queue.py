import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from lockstep.report import background_queue
from lockstep.report.background_queue import BackgroundQueue


@pytest.fixture
def release():
    """An event for jobs that hang; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def hang(queue, release):
    """Fill the queue's thread with a job that returns when ``release`` is set."""
    running = threading.Event()
    queue.put("hanging", lambda: (running.set(), release.wait(120)))
    assert running.wait(60)


def test_jobs_are_done_in_order_on_one_thread():
    done, queue = [], BackgroundQueue("a-queue", size=1000)
    for number in range(200):
        assert queue.put(str(number), lambda number=number: done.append((number, threading.current_thread().name)))
    assert queue.flush(60) == []
    assert done == [(number, "a-queue") for number in range(200)]


def test_a_full_queue_takes_nothing_more_and_holds_nobody_up(release):
    queue = BackgroundQueue("full", size=2)
    hang(queue, release)
    assert [queue.put(name, lambda: None) for name in "abcd"] == [True, True, False, False]
    assert queue.put("last", lambda: None, even_if_full=True)
    assert queue.flush(0) == ["hanging", "a", "b", "last"], "the first one still hangs"


def test_flush_names_what_is_left_the_one_under_way_first(release):
    queue = BackgroundQueue("slow", size=9)
    hang(queue, release)
    queue.put("second", lambda: None)
    begin = time.monotonic()
    assert queue.flush(0.2) == ["hanging", "second"]
    assert 0.2 <= time.monotonic() - begin < 30
    release.set()
    assert queue.flush(60) == []


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3)])
def test_a_job_that_raises_is_logged_and_the_next_is_done(caplog, error):
    def fail():
        raise error

    done, queue = [], BackgroundQueue("failing", size=9)
    queue.put("the first", fail)
    queue.put("the second", lambda: done.append(2))
    assert queue.flush(60) == [] and done == [2]
    assert f"failing: the first failed: {error}" in caplog.text


def test_the_thread_ends_when_it_is_idle_and_starts_again(monkeypatch):
    monkeypatch.setattr(background_queue, "IDLE_S", 0.05)
    queue = BackgroundQueue("idle", size=9)
    threads = []
    for _ in range(2):
        queue.put("one", lambda: threads.append(threading.current_thread()))
        assert queue.flush(60) == []
        threads[-1].join(60)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]


def test_a_job_that_is_done_keeps_nothing_alive(caplog):
    caplog.set_level("CRITICAL", "lockstep")  # pytest keeps the stack of what is logged

    class Array:
        pass

    def fail(array):
        raise ValueError(repr(array))

    queue = BackgroundQueue("forgetful", size=9)
    arrays = [Array(), Array()]
    seen = [weakref.ref(array) for array in arrays]
    queue.put("good", lambda array=arrays[0]: repr(array))
    queue.put("bad", lambda array=arrays[1]: fail(array))
    assert queue.flush(60) == []
    del arrays
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


EXIT = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("background_queue", sys.argv[1])
background_queue = sys.modules["background_queue"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(background_queue)
background_queue.WAIT_S = 3
queue = background_queue.BackgroundQueue("at-exit", size=99)
queue.put("slow", lambda: (time.sleep(0.1), print("done", flush=True)))
queue.put("step 2 (3 rows)", lambda: time.sleep(600))
for step in range(4, 26, 2):
    queue.put(f"step {step} (3 rows)", lambda: None)
"""


def test_python_waits_a_moment_for_jobs_when_it_ends():
    """And names what is lost. The module alone, because importing jax takes seconds."""
    command = [sys.executable, "-c", EXIT, background_queue.__file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "done\n"), result
    named = ", ".join(f"step {step} (3 rows)" for step in range(2, 22, 2))
    assert result.stderr.startswith(
        f"at-exit: this process ends, and what is not done is lost: {named} and 2 more. The last call of a loop waits "
        "longer: SampleCallback.finish()"
    )
