"""A tracker behind a bounded queue: one that is down or slow neither blocks nor fails training."""

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lockstep.report.rows import TableRow
from lockstep.report.trackers import Tracker

log = logging.getLogger(__name__)

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
        wait_s: The seconds that a call waits for the tracker, so that what is logged afterwards comes after it; an
            error within that time is raised. A call does not wait while earlier ones are not done. 0: it never waits.
    """

    def __init__(
        self,
        tracker: Tracker,
        guard: Guard = contextlib.nullcontext,
        *,
        size: int = QUEUE_SIZE,
        finish_s: float = FINISH_S,
        wait_s: float = 0.0,
    ) -> None:
        self.dropped = 0
        """The number of calls that found the queue full, or were left when the time to finish was over."""
        self.errors = 0
        """The number of calls in which the tracker failed."""
        self._tracker, self._guard, self._finish_s, self._wait_s = tracker, guard, finish_s, wait_s
        self._queue: queue.Queue[_Call | None] = queue.Queue(size)
        self._last: _Call | None = None
        self._warned_slow = False
        self._thread: threading.Thread | None = None
        self._finished = False

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Queue scalars to be recorded.

        Args:
            metrics: The values by their names.
            step: The number of training steps completed.
        """
        values = dict(metrics)
        self._call(lambda: self._tracker.log(values, step=step))

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Queue rows to be added to a table.

        Args:
            name: The table's name.
            rows: The rows.
            step: The number of training steps completed.
        """
        kept = list(rows)
        self._call(lambda: self._tracker.log_rows(name, kept, step=step))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the tracker has done all calls so far.

        Args:
            timeout_s: The seconds to wait at most.

        Returns:
            Whether the tracker has done them.
        """
        return self._last is None or self._last.done.wait(timeout_s)

    def finish(self) -> None:
        """Wait for the calls that are left and finish the tracker, ``finish_s`` seconds in all; log what was lost."""
        if self._finished:
            return
        deadline = time.monotonic() + self._finish_s
        with contextlib.suppress(queue.Full):
            self._put(self._tracker.finish, wait_s=self._finish_s)
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._finished = True
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self.dropped += self._queue.qsize()
                log.error("the tracker did not finish within %g s; it is left behind", self._finish_s)
        if self.dropped or self.errors:
            log.warning("the tracker failed %d times, and %d calls were dropped", self.errors, self.dropped)

    def _call(self, work: Callable[[], None]) -> None:
        waits = self._wait_s > 0 and self.flush(0.0)
        call = self._put(work)
        if not waits or call is None:
            return
        if call.done.wait(self._wait_s):
            if call.error is not None:
                raise call.error
        elif not self._warned_slow:
            self._warned_slow = True
            log.error("the tracker is slow, more than %g s for a call: training does not wait for it", self._wait_s)

    def _put(self, work: Callable[[], None], wait_s: float = 0.0) -> "_Call | None":
        if self._finished:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-tracker", daemon=True)
            self._thread.start()
        call = _Call(work)
        try:
            self._queue.put(call, block=wait_s > 0, timeout=wait_s or None)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                log.error("the tracker is too slow: what it cannot take is dropped and counted; training goes on")
            return None
        self._last = call
        return call

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                with self._guard():
                    call.work()
            except Exception as error:
                self.errors += 1
                call.error = error
                if self.errors == 1:
                    log.error("the tracker failed; training goes on, later failures are counted", exc_info=error)
            call.done.set()
            # While the thread waits for the next call, an error's stack would keep the arrays of that round alive.
            del call


@dataclasses.dataclass
class _Call:
    """One call of the tracker: what to do, whether it is done, and what it raised."""

    work: Callable[[], None]
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: Exception | None = None
