"""The progress of a job on the leader."""

import contextlib

import pytest

from lockstep.batch_inference.job_progress import HostProgress, JobProgress
from lockstep.batch_inference.progress_output import ProgressOutput
from lockstep.report import NoopTracker


class Seen(NoopTracker):
    """A tracker, and the view."""

    def __init__(self):
        self.steps, self.seconds, self.closed = [], [], False

    def log(self, values, step):
        self.steps.append(step)

    def update(self, job):
        self.seconds.append(job.seconds)

    def close(self):
        self.closed = True


@pytest.mark.parametrize("defer", [False, True])
def test_the_view_has_all_and_the_tracker_what_comes_every_ten_seconds_and_the_last(defer):
    seen = Seen()
    with contextlib.closing(ProgressOutput(seen, seen, defer=defer)) as show:
        for seconds in (0.0, 4.0, 11.0, 12.0):
            show(JobProgress(rows=100, found=int(seconds), hosts=[HostProgress()], seconds=seconds))
        assert seen.steps == ([] if defer else [0, 11])
    assert seen.seconds == [0.0, 4.0, 11.0, 12.0] and seen.steps == [0, 11, 12] and seen.closed


def test_another_host_than_the_leader_shows_nothing():
    seen = Seen()
    ProgressOutput(None, seen, defer=False).close()
    assert not seen.steps
