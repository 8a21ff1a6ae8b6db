import contextlib
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref

import pytest

from lockstep.report import background
from lockstep.report.background import BackgroundQueue, BackgroundTracker, ReportWait
from lockstep.report.trackers import NoopTracker
from tests.clock import PATIENCE_S, until


class Recorder(NoopTracker):
    def __init__(self, wait=None, fail=False):
        self.steps, self.threads, self.finished = [], set(), False
        self.wait, self.fail = wait, fail

    def log(self, metrics, *, step):
        if self.wait is not None:
            self.wait.wait(60)
        self.threads.add(threading.current_thread().name)
        self.steps.append(step)
        if self.fail:
            raise ConnectionError("down")

    def finish(self):
        self.finished = True


def test_everything_arrives_in_order_from_one_thread():
    recorder = Recorder()
    tracker = BackgroundTracker(recorder)
    for step in range(100):
        tracker.log({"loss": 1.0}, step=step)
    tracker.finish()
    tracker.finish()
    assert recorder.steps == list(range(100)) and recorder.threads == {"lockstep-tracker"}
    assert recorder.finished and (tracker.dropped, tracker.errors) == (0, 0)


def test_a_tracker_that_blocks_does_not_block_and_what_it_misses_is_counted(caplog):
    release = threading.Event()
    tracker = BackgroundTracker(Recorder(wait=release), size=4, finish_s=0.3)
    for step in range(20):
        tracker.log({}, step=step)
    assert 15 <= tracker.dropped <= 16
    tracker.finish()
    assert "did not finish within 0.3 s" in caplog.text and caplog.text.count("too slow") == 1
    release.set()


def test_a_tracker_that_fails_is_counted_and_finished(caplog):
    recorder = Recorder(fail=True)
    tracker = BackgroundTracker(recorder)
    for step in range(3):
        tracker.log({}, step=step)
    tracker.finish()
    assert tracker.errors == 3 and recorder.finished and recorder.steps == [0, 1, 2]
    assert caplog.text.count("the tracker failed; training goes on") == 1
    assert "the tracker failed 3 times, and 0 calls were dropped" in caplog.text


def test_calls_are_guarded():
    entered = []

    @contextlib.contextmanager
    def guard():
        entered.append(threading.current_thread().name)
        yield

    tracker = BackgroundTracker(Recorder(), guard)
    tracker.log({}, step=0)
    tracker.finish()
    assert entered == ["lockstep-tracker"] * 2


def test_a_tracker_that_was_slow_loses_nothing():
    release = threading.Event()
    recorder = Recorder(wait=release)
    tracker = BackgroundTracker(recorder)
    for step in range(100):
        tracker.log({}, step=step)
    assert not tracker.flush(0.05) and recorder.steps == []
    release.set()
    assert tracker.flush(30) and recorder.steps == list(range(100))
    assert (tracker.dropped, tracker.errors) == (0, 0) and not recorder.finished


def test_a_call_after_finishing_is_counted():
    tracker = BackgroundTracker(Recorder())
    tracker.finish()
    tracker.log({}, step=1)
    assert tracker.dropped == 1


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
    monkeypatch.setattr(background, "IDLE_S", 0.05)
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
spec = importlib.util.spec_from_file_location("background", sys.argv[1])
background = sys.modules["background"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(background)
background.WAIT_S = 3
queue = background.BackgroundQueue("at-exit", size=99)
queue.put("slow", lambda: (time.sleep(0.1), print("done", flush=True)))
queue.put("step 2 (3 rows)", lambda: time.sleep(600))
for step in range(4, 26, 2):
    queue.put(f"step {step} (3 rows)", lambda: None)
"""


@pytest.mark.slow
def test_python_waits_a_moment_for_jobs_when_it_ends():
    """And names what is lost. The module alone, because importing jax takes seconds."""
    command = [sys.executable, "-c", EXIT, background.__file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "done\n"), result
    named = ", ".join(f"step {step} (3 rows)" for step in range(2, 22, 2))
    assert result.stderr.startswith(
        f"at-exit: this process ends, and what is not done is lost: {named} and 2 more. The last call of a loop waits "
        "longer: SampleCallback.finish()"
    )


LONG_S = 3600.0
"""Longer than any wait of these tests lasts."""


class Reports:
    """What a run has reported: done, or hanging until released; counts how often it was asked for."""

    def __init__(self):
        self.done, self.asked = threading.Event(), 0

    def __call__(self):
        self.asked += 1
        return self.done.wait(LONG_S)


@pytest.fixture
def reports():
    made = Reports()
    yield made
    made.done.set()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A wait that is not cut short would be seen."""
    monkeypatch.setattr(background, "REPORT_WAIT_S", LONG_S)


@contextlib.contextmanager
def waiting(wait, step=1):
    """In the block a thread waits, which has asked for the reports; after the block it has ended."""
    thread = threading.Thread(target=wait, args=(step,), daemon=True)
    thread.start()
    until(lambda: wait._asking)
    yield
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_it_ends_with_the_reports(reports, caplog):
    wait = ReportWait(reports)
    with waiting(wait):
        assert wait._end() == wait._begin + LONG_S
        reports.done.set()
    assert not caplog.text


def test_it_is_cut_short_when_training_begins_to_wait(reports, caplog):
    wait = ReportWait(reports)
    with waiting(wait, 7):
        wait.training_waits(True)
        assert wait._end() == wait._training_since + background.TRAINING_WAIT_S
    assert "the checkpoint of step 7 counts without all reports" in caplog.text


def test_where_training_waits_already_it_has_the_same_time(reports):
    wait = ReportWait(reports)
    wait.training_waits(True)
    wait._training_since -= 100  # the arrays were being written
    with waiting(wait):
        assert wait._end() == wait._begin + background.TRAINING_WAIT_S


def test_training_that_waits_no_more_gives_the_time_back(reports):
    wait = ReportWait(reports)
    wait.training_waits(True)
    wait.training_waits(False)
    with waiting(wait):
        assert wait._end() == wait._begin + LONG_S
        reports.done.set()


def test_a_signal_ends_it(reports):
    wait = ReportWait(reports)
    with waiting(wait):
        wait.signalled()
        assert wait._end() == wait._begin + background.PROMPT_S
    wait(2)  # at once


def test_what_is_done_is_seen_after_a_signal_too(reports, caplog):
    wait = ReportWait(reports)
    wait.signalled()
    reports.done.set()
    wait(1)
    assert not caplog.text


def test_reports_that_hang_cost_one_wait_until_they_have_caught_up(reports, monkeypatch, caplog):
    monkeypatch.setattr(background, "REPORT_WAIT_S", 0.1)
    wait = ReportWait(reports)
    wait(1)
    monkeypatch.setattr(background, "REPORT_WAIT_S", LONG_S)
    wait(2)  # at once
    assert reports.asked == 1 and caplog.text.count("counts without all reports") == 1
    reports.done.set()
    until(lambda: not wait._asking)
    reports.done.clear()
    with waiting(wait, 3):
        assert wait._end() == wait._begin + LONG_S, "they had caught up: they are waited for again"
        reports.done.set()
    assert caplog.text.count("counts without all reports") == 1


def test_reports_that_gave_up_are_asked_for_again_without_a_long_wait(caplog):
    """`SampleCallback.flush` returns after ``flush_s`` at the latest, with False."""
    answers = [False, None, True]
    hangs = threading.Event()

    def reported():
        answer = answers.pop(0)
        return hangs.wait(LONG_S) if answer is None else answer

    wait = ReportWait(reported)
    wait(1)
    with waiting(wait, 2):
        assert wait._end() == wait._begin + background.PROMPT_S
    hangs.set()
    until(lambda: not wait._asking)
    wait(3)
    assert caplog.text.count("counts without all reports") == 1 and answers == []


def test_an_error_is_said_and_fails_no_checkpoint(caplog):
    def reported():
        raise OSError("no such queue")

    with caplog.at_level(logging.ERROR):
        ReportWait(reported)(1)
    assert "waiting for reports failed: no such queue" in caplog.text
