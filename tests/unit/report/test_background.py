import contextlib
import threading

from lockstep.report.background import BackgroundTracker
from lockstep.report.trackers import NoopTracker


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
