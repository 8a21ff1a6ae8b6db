"""The wait of a checkpoint for the reports of the steps up to it, before it counts."""

import threading
import time
from collections.abc import Callable

from lockstep.credentials import get_logger

log = get_logger(__name__)

REPORT_WAIT_S = 10.0
"""Seconds that a checkpoint waits for reports while nobody waits for the checkpoint."""
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
