"""The progress of a job on the leader: shown at once, sent to the tracker at once or at the end."""

import sys

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.batch_inference.job_progress import JobProgress
from lockstep.hosts import leader_only, try_leader_only
from lockstep.printable import print_lines, write_to_stdout
from lockstep.report import Tracker
from lockstep.terminal import console

KEPT = "all rows are on disk"  # what stays where the leader's own work fails
INTERVAL_S = 10.0  # seconds between two reports to the tracker, and between two lines in a log
UNKNOWN = "–"
LISTED_HOSTS = 8  # the most hosts whose speeds are shown one by one


class ProgressOutput:
    """Takes progress on the leader: a bar stays at the bottom of a terminal; elsewhere there is a line every few
    seconds, and one at the end.

    Args:
        title: The heading of the bar; None on a process that shows nothing.
        defer: Whether the tracker gets all of it at the end.
    """

    def __init__(self, title: str | None, tracker: Tracker, *, defer: bool) -> None:
        self._title, self._tracker, self._defer = title, tracker, defer
        self._kept: list[JobProgress] = []
        self._last: JobProgress | None = None
        self._next = 0.0
        self._live = Live(console=console(), auto_refresh=False) if title and console().is_terminal else None
        if self._live is not None:
            write_to_stdout(self._live.start)

    def __call__(self, job: JobProgress) -> None:
        assert self._title is not None
        with leader_only():
            self._last = job
            if (live := self._live) is not None:
                shown = bar(job, self._title)
                write_to_stdout(lambda: live.update(shown, refresh=True))
            if job.seconds >= self._next:
                self._next = job.seconds + INTERVAL_S
                self._report(job)
                if not self._defer:
                    self._flush()

    def close(self) -> None:
        if self._live is not None:
            write_to_stdout(self._live.stop)
        if self._last is not None:
            self._report(self._last)
        if self._title is not None and sys.exc_info()[0] is None:
            try_leader_only("the tracker", self._flush, KEPT)

    def _report(self, job: JobProgress) -> None:
        """For the log, and for the tracker, unless they have it: how it ended is logged in any case."""
        self._last = None
        self._kept.append(job)
        if self._live is None:
            print_lines(line(job))

    def _flush(self) -> None:
        kept, self._kept = self._kept, []
        for job in kept:
            values: dict[str, float | str] = {f"sample/progress/{k}": v for k, v in job.metrics().items()}
            self._tracker.log({**values, "sample/progress/seconds": job.seconds}, step=job.rows_done)


def bar(job: JobProgress, title: str) -> RenderableType:
    """Return what a terminal shows."""
    grid = Table.grid(expand=True)  # a bar outside a grid would not end its line
    grid.add_row(ProgressBar(total=max(1, job.rows), completed=job.rows_done))
    return Group(Text(title), grid, Text(line(job)))


def line(job: JobProgress) -> str:
    """Return progress, speed, pages and time left."""
    speed = f"{job.rate:,.0f} tokens/s"
    if len(job.hosts) > 1:
        speed += f" ({_rates(job)})"
    floor = UNKNOWN if job.over_floor is None else f"{job.over_floor:.2g}"
    used, pages = (sum(getattr(host, name) for host in job.hosts) for name in ("pages", "max_pages"))
    parts = [
        f"{job.prompts_done:,} of {job.prompts:,} prompts",
        f"{job.rows_done:,} of {job.rows:,} completions",
        speed,
        f"{floor} of the bandwidth floor",
        *([f"drafts {job.drafts}"] if job.drafts.drafted else []),
        f"{used:,} of {pages:,} pages in use",
        f"{UNKNOWN if job.eta_s is None else _clock(job.eta_s)} left",
    ]
    return f"sample: {', '.join(parts)}"


def _rates(job: JobProgress) -> str:
    """Return the speed of each host, or the lowest and the highest where that would be a long list."""
    rates = [host.rate for host in job.hosts]
    if len(rates) > LISTED_HOSTS:
        return f"{min(rates):,.0f} to {max(rates):,.0f} on each of {len(rates)} hosts"
    return " + ".join(f"{rate:,.0f}" for rate in rates)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
