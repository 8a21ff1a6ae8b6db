"""The progress of a job on the leader: shown at once, sent to the tracker at once or at the end."""

import sys

from lockstep.batch_inference.job_progress import JobProgress
from lockstep.batch_inference.summary import LiveView
from lockstep.hosts import leader_only, try_leader_only
from lockstep.report import Tracker

KEPT = "all rows are on disk"  # what stays where the leader's own work fails


class ProgressOutput:
    """Takes progress on the leader."""

    def __init__(self, view: LiveView | None, tracker: Tracker, *, defer: bool) -> None:
        self._view, self._tracker, self._defer = view, tracker, defer
        self._kept: list[JobProgress] = []
        self._last: JobProgress | None = None
        self._next = 0.0

    def __call__(self, job: JobProgress) -> None:
        assert self._view is not None
        with leader_only():
            self._view.update(job)
            self._last = job
            if job.seconds >= self._next:
                self._next = job.seconds + 10.0
                self._keep(job)
                if not self._defer:
                    self._flush()

    def close(self) -> None:
        if self._view is None:
            return
        self._view.close()
        if sys.exc_info()[0] is None:
            if self._last is not None:
                self._keep(self._last)
            try_leader_only("the tracker", self._flush, KEPT)

    def _keep(self, job: JobProgress) -> None:
        """For the tracker, unless it is there: how it ended is logged in any case."""
        self._last = None
        self._kept.append(job)

    def _flush(self) -> None:
        kept, self._kept = self._kept, []
        for job in kept:
            values: dict[str, float | str] = {f"sample/progress/{k}": v for k, v in job.metrics().items()}
            self._tracker.log({**values, "sample/progress/seconds": job.seconds}, step=job.rows_done)
