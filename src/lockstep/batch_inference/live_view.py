"""The live view of a job, which the leader shows: a panel at a terminal, lines in a log."""

import time
from collections.abc import Callable

import rich
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.batch_inference.job_progress import JobProgress

UNKNOWN = "–"
LISTED_HOSTS = 8
"""The most hosts whose speeds are shown one by one on a line."""
LINE_S = 10.0
"""Seconds between two lines in a log."""


class PanelView:
    """A panel that stays at the bottom of a terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._live = Live(console=rich.get_console(), auto_refresh=False)
        self._live.start()

    def update(self, job: JobProgress) -> None:
        """Redraw the panel."""
        self._live.update(panel(job, self._title), refresh=True)

    def close(self) -> None:
        """Leave the panel as it is and give the terminal back."""
        self._live.stop()


class LineView:
    """A line every few seconds, the last one at the end."""

    def __init__(
        self,
        print_line: Callable[[str], None],
        every_s: float = LINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._print, self._every_s, self._clock = print_line, every_s, clock
        self._next = 0.0
        self._pending: JobProgress | None = None
        self._printed = ""

    def update(self, job: JobProgress) -> None:
        """Print a line unless the last one is less than ``every_s`` old."""
        self._pending = job
        if self._clock() >= self._next:
            self._next = self._clock() + self._every_s
            self.close()

    def close(self) -> None:
        """Print the last state unless it was printed already."""
        if self._pending is not None and (text := line(self._pending)) != self._printed:
            self._print(text)
            self._printed = text
        self._pending = None


type LiveView = PanelView | LineView


def make_live_view(title: str) -> LiveView:
    """Make a panel where the leader's output is a terminal, else lines."""
    if rich.get_console().is_terminal:
        return PanelView(title)
    return LineView(lambda text: print(text, flush=True))


def line(job: JobProgress) -> str:
    """Return all that the panel shows, on one line."""
    speed = f"{job.rate:,.0f} tokens/s"
    if len(job.host_rates) > 1:
        speed += f" ({_rates(job)})"
    done = f"{job.prompts_done:,} of {job.prompts:,} prompts, {job.rows_done:,} of {job.rows:,} completions"
    parts = (done, speed, _floor(job), _pages(job), f"{_eta(job)} left")
    return f"sample: {', '.join(parts)}"


def panel(job: JobProgress, title: str) -> RenderableType:
    """Return progress, speed, pages and time left, and a row per host where each has prompts of its own."""
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="dim")
    figures.add_column()
    figures.add_row("prompts", f"{job.prompts_done:,} of {job.prompts:,}")
    figures.add_row("completions", f"{job.rows_done:,} of {job.rows:,}" + _found(job))
    figures.add_row("speed", f"{job.rate:,.0f} tokens/s, {_floor(job)}")
    if len(job.host_rates) > len(job.hosts):
        figures.add_row("hosts", f"{_rates(job)} tokens/s on their devices")
    if job.drafts.drafted:
        figures.add_row("drafts", str(job.drafts))
    figures.add_row("KV cache", _pages(job))
    figures.add_row("time", f"{_clock(job.seconds)} so far, {_eta(job)} left")
    bar = Table.grid(expand=True)  # a bar outside a grid would not end its line
    bar.add_row(ProgressBar(total=max(1, job.rows), completed=job.rows_done))
    parts: list[RenderableType] = [bar, figures]
    if len(job.hosts) > 1:
        parts.append(_hosts(job))
    return Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED)


def _hosts(job: JobProgress) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("host", "completions", "tokens", "tokens/s", "pages in use"):
        table.add_column(name, justify="left" if name == "host" else "right")
    for number, host in enumerate(job.hosts):
        pages = "done" if host.done else f"{host.pages:,} of {host.max_pages:,}"
        table.add_row(
            Text(str(number)),
            f"{host.rows:,}",
            f"{host.tokens:,}",
            f"{host.rate:,.0f}" if host.rate else UNKNOWN,
            pages,
        )
    return table


def _rates(job: JobProgress) -> str:
    """Return the speed of each host, or the lowest and the highest where that would be a long list."""
    rates = job.host_rates
    if len(rates) > LISTED_HOSTS:
        return f"{min(rates):,.0f} to {max(rates):,.0f} on each of {len(rates)} hosts"
    return " + ".join(f"{rate:,.0f}" for rate in rates)


def _found(job: JobProgress) -> str:
    """Return how many rows earlier runs left, or nothing."""
    return f" ({job.found:,} were there from before)" if job.found else ""


def _floor(job: JobProgress) -> str:
    if job.over_floor is None:
        return f"{UNKNOWN} of the bandwidth floor"
    return f"{job.over_floor:.2g} of the bandwidth floor"


def _pages(job: JobProgress) -> str:
    return f"{sum(h.pages for h in job.hosts):,} of {sum(h.max_pages for h in job.hosts):,} pages in use"


def _eta(job: JobProgress) -> str:
    return UNKNOWN if job.eta_s is None else _clock(job.eta_s)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
