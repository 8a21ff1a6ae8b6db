"""Reports that neither block nor fail training: jobs behind a bounded queue, a tracker there, and a wait for them."""

import atexit
import collections
import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from lockstep.exits import WAIT_S, before_end, finish_work
from lockstep.printable import get_logger
from lockstep.report.rows import TableRow
from lockstep.report.trackers import Tracker, alert_tracker, rewind_tracker

log = get_logger(__name__)

IDLE_S = 1.0  # seconds without a job after which the thread ends; the next job starts another
SHOWN_JOBS = 10  # jobs of a queue that are named when the process ends before they are done; further ones are counted


class BackgroundQueue:
    """Does jobs in order on a thread of its own. Only `flush` ever waits for them.

    A job keeps alive what it refers to until it is done, so it should refer to no device array.
    """

    def __init__(self, name: str, *, size: int) -> None:
        self.name, self._size = name, size
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Job] = collections.deque()
        self._current: _Job | None = None
        self._thread: threading.Thread | None = None
        _queues.add(self)

    def put(self, description: str, work: Callable[[], object], *, even_if_full: bool = False) -> bool:
        """Queue a job; returns at once.

        Args:
            what: The name of the job, as `flush` returns it.

        Returns:
            Whether the job was taken: not where the queue is full.
        """
        with self._changed:
            if len(self._waiting) >= self._size and not even_if_full:
                return False
            self._waiting.append(_Job(description, work))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
        return True

    def flush(self, timeout_s: float) -> list[str]:
        """Wait until every job is done; return the names of those that are not by then, the one under way first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left(), timeout_s)
            return [job.description for job in self._left()]

    def _left(self) -> list["_Job"]:
        return [*([] if self._current is None else [self._current]), *self._waiting]

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException as error:  # SystemExit too: the thread has more to do
                log.error("%s: %s failed: %s", self.name, self._doing, error, exc_info=error)
            # While the thread waits for the next job, this name would keep the job's objects alive.
            del work

    @property
    def _doing(self) -> str:
        return "" if self._current is None else self._current.description

    def _next(self) -> Callable[[], object] | None:
        """The next job, whose predecessor is done; None, and no thread from then on, where none comes."""
        with self._changed:
            self._current = None
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: bool(self._waiting), IDLE_S):
                self._thread = None
                return None
            self._current = self._waiting.popleft()
            return self._current.work


@dataclasses.dataclass(frozen=True)
class _Job:
    description: str
    work: Callable[[], object]


_queues: weakref.WeakSet[BackgroundQueue] = weakref.WeakSet()


@before_end
def _flush_all(timeout_s: float) -> list[str]:
    """Wait until every job of every queue is done; a sentence for each queue that has jobs left."""
    deadline, lost = time.monotonic() + timeout_s, []
    for queue in list(_queues):
        if left := queue.flush(max(0.0, deadline - time.monotonic())):
            more = f" and {len(left) - SHOWN_JOBS} more" if len(left) > SHOWN_JOBS else ""
            lost.append(
                f"{queue.name}: this process ends, and what is not done is lost: {', '.join(left[:SHOWN_JOBS])}{more}. "
                "The last call of a loop waits longer: SampleCallback.finish(), BackgroundTracker.finish()."
            )
    return lost


@atexit.register
def _flush_at_exit() -> None:
    """A loop that ends without its last call loses nothing that is done within moments, and is told of the rest."""
    for text in finish_work(WAIT_S):
        log.error("%s", text)


QUEUE_SIZE = 1000  # the number of calls that may wait for the tracker; further ones are dropped and counted
FINISH_S = 60.0  # the seconds that finishing may take

type Guard = Callable[[], contextlib.AbstractContextManager[None]]


class BackgroundTracker:
    """Passes calls on to a tracker from a thread of its own, in order, and returns at once.

    Args:
        guard: A function that makes a context around each of its calls, such as ``lockstep.leader_only``, in which a
            launch raises.
    """

    def __init__(
        self,
        tracker: Tracker,
        guard: Guard = contextlib.nullcontext,
        *,
        size: int = QUEUE_SIZE,
        finish_s: float = FINISH_S,
    ) -> None:
        self.dropped = 0  # the number of calls that found the queue full, or were left when the time to finish was over
        self.errors = 0  # the number of calls in which the tracker failed
        self._tracker, self._guard, self.finish_s = tracker, guard, finish_s
        self._queue = BackgroundQueue("lockstep-tracker", size=size)
        self._finished = False

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Queue scalars to be recorded."""
        values = dict(metrics)
        self._put(f"log of step {step}", lambda: self._tracker.log(values, step=step))

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Queue rows to be added to a table."""
        kept = list(rows)
        self._put(f"rows of step {step}", lambda: self._tracker.log_rows(name, kept, step=step))

    def rewind(self, *, step: int, rounds_step: int, rounds: Sequence[str]) -> None:
        """Queue what `rewind_tracker` does."""
        self._put(
            f"rewind to step {step}",
            lambda: rewind_tracker(self._tracker, step=step, rounds_step=rounds_step, rounds=rounds),
        )

    def alert(self, *, title: str, text: str, step: int) -> None:
        """Queue what `alert_tracker` does."""
        self._put(f"alert of step {step}", lambda: alert_tracker(self._tracker, title=title, text=text, step=step))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the tracker has done all calls; return whether it has."""
        return not self._queue.flush(timeout_s)

    def finish(self) -> None:
        """Wait for the calls that are left and finish the tracker, ``finish_s`` seconds in all; log what was lost."""
        if self._finished:
            return
        self._finished = True
        self._queue.put("finish", lambda: self._call(self._tracker.finish), even_if_full=True)
        if left := self._queue.flush(self.finish_s):
            self.dropped += len(left) - 1  # the last is finishing itself
            log.error("the tracker did not finish within %g s; it is left behind", self.finish_s)
        if self.dropped or self.errors:
            log.warning("the tracker failed %d times, and %d calls were dropped", self.errors, self.dropped)

    def _put(self, description: str, work: Callable[[], None]) -> None:
        if self._finished:
            self.dropped += 1
        elif not self._queue.put(description, lambda: self._call(work)):
            self.dropped += 1
            if self.dropped == 1:
                log.error("the tracker is too slow: what it cannot take is dropped and counted; training goes on")

    def _call(self, work: Callable[[], None]) -> None:
        try:
            with self._guard():
                work()
        except Exception as error:
            self.errors += 1
            if self.errors == 1:
                log.error("the tracker failed; training goes on, later failures are counted", exc_info=error)


REPORT_WAIT_S = 10.0  # seconds that a checkpoint waits for reports while nobody waits for the checkpoint
TRAINING_WAIT_S = 0.5
"""Seconds of them once training waits for the checkpoint: before the next save, and at the end of training."""
PROMPT_S = 0.1
"""Seconds after a signal, and where reports did not come in time before: what is done already is seen within these."""


class ReportWait:
    """Waits on the leader, in the thread of a save, until the reports of the steps so far are where they belong.

    A run that goes on from a checkpoint does not report its steps again, so their reports should be on disk before the
    checkpoint counts. Reports may hang, and neither training nor a machine's last seconds may be spent on them: then
    the checkpoint counts without them. Training waits for reports at most `TRAINING_WAIT_S` when they fall behind, and
    at most `PROMPT_S` a save from then on, until they have caught up.

    Args:
        reported: Returns whether everything that was reported before the call is where it belongs; may take long.
    """

    def __init__(self, reported: Callable[[], bool]) -> None:
        self._reported = reported
        self._changed = threading.Condition()
        self._asking = self._complete = self._behind = self._signalled = False
        self._begin = 0.0
        self._training_since: float | None = None

    def __call__(self, step: int) -> None:
        """Wait; say so where reports have fallen behind."""
        with self._changed:
            if self._asking:
                return  # for a checkpoint before this one, which has said so
            self._asking, self._complete, self._begin = True, False, time.monotonic()
            threading.Thread(target=self._ask, name="lockstep-checkpoint-reports", daemon=True).start()
            while self._asking and (left_s := self._end() - time.monotonic()) > 0:
                self._changed.wait(left_s)
            was_behind, self._behind = self._behind, not self._complete
            if self._complete or was_behind:
                return
            waited_s = time.monotonic() - self._begin
        log.warning(
            "the checkpoint of step %d counts without all reports up to it: they were not written within %.1f s. A "
            "metric, the disk or the tracker is slow or hangs. What is not written when this process ends is lost. "
            "Until reports have caught up, no checkpoint waits for them",
            step,
            waited_s,
        )

    def training_waits(self, waits: bool) -> None:
        """Say whether training waits for the checkpoint from now on."""
        with self._changed:
            self._training_since = time.monotonic() if waits else None
            self._changed.notify_all()

    def signalled(self) -> None:
        """Say that the machine may be taken away: from now on no wait is longer than a moment."""
        with self._changed:
            self._signalled = True
            self._changed.notify_all()

    def _end(self) -> float:
        """When the wait that is under way ends at the latest."""
        if self._behind or self._signalled:
            return self._begin + PROMPT_S
        end = self._begin + REPORT_WAIT_S
        if self._training_since is not None:
            end = min(end, max(self._begin, self._training_since) + TRAINING_WAIT_S)
        return end

    def _ask(self) -> None:
        """The thread of a wait, which outlives it where reports hang."""
        complete = False
        try:
            complete = self._reported()
        except Exception as error:
            log.error("waiting for reports failed: %s", error, exc_info=error)
        with self._changed:
            self._asking, self._complete = False, complete
            self._behind = self._behind and not complete
            self._changed.notify_all()
