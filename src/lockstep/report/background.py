"""A tracker behind a bounded queue: one that is down or slow neither blocks nor fails training."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from lockstep.credentials import get_logger
from lockstep.report.background_queue import BackgroundQueue
from lockstep.report.rows import TableRow
from lockstep.report.trackers import Tracker

log = get_logger(__name__)

QUEUE_SIZE = 1000
"""The number of calls that may wait for the tracker; further ones are dropped and counted."""
FINISH_S = 60.0
"""The seconds that finishing may take."""

type Guard = Callable[[], contextlib.AbstractContextManager[None]]


class BackgroundTracker:
    """Passes calls on to a tracker from a thread of its own, in order, and returns at once.

    Args:
        tracker: The tracker, which is called from that thread alone.
        guard: A function that makes a context around each of its calls, such as ``lockstep.leader_only``, in which a
            launch raises.
        size: The number of calls that may wait; further ones are dropped and counted.
        finish_s: The seconds that ``finish`` waits for the calls that are left.
    """

    def __init__(
        self,
        tracker: Tracker,
        guard: Guard = contextlib.nullcontext,
        *,
        size: int = QUEUE_SIZE,
        finish_s: float = FINISH_S,
    ) -> None:
        self.dropped = 0
        """The number of calls that found the queue full, or were left when the time to finish was over."""
        self.errors = 0
        """The number of calls in which the tracker failed."""
        self._tracker, self._guard, self._finish_s = tracker, guard, finish_s
        self._queue = BackgroundQueue("lockstep-tracker", size=size)
        self._finished = False

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Queue scalars to be recorded.

        Args:
            metrics: The values by their names.
            step: The number of training steps completed.
        """
        values = dict(metrics)
        self._put(f"log of step {step}", lambda: self._tracker.log(values, step=step))

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Queue rows to be added to a table.

        Args:
            name: The table's name.
            rows: The rows.
            step: The number of training steps completed.
        """
        kept = list(rows)
        self._put(f"rows of step {step}", lambda: self._tracker.log_rows(name, kept, step=step))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the tracker has done all calls.

        Args:
            timeout_s: The seconds to wait at most.

        Returns:
            Whether the tracker has done them.
        """
        return not self._queue.flush(timeout_s)

    def finish(self) -> None:
        """Wait for the calls that are left and finish the tracker, ``finish_s`` seconds in all; log what was lost."""
        if self._finished:
            return
        self._finished = True
        self._queue.put("finish", lambda: self._call(self._tracker.finish), even_if_full=True)
        if left := self._queue.flush(self._finish_s):
            self.dropped += len(left) - 1  # the last is finishing itself
            log.error("the tracker did not finish within %g s; it is left behind", self._finish_s)
        if self.dropped or self.errors:
            log.warning("the tracker failed %d times, and %d calls were dropped", self.errors, self.dropped)

    def _put(self, what: str, work: Callable[[], None]) -> None:
        if self._finished:
            self.dropped += 1
        elif not self._queue.put(what, lambda: self._call(work)):
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
