"""The progress of a run as its user sees it: a bar at a terminal, lines in a log."""

import math
import time
from collections import deque
from typing import Protocol

import rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

UNKNOWN = "–"


class ProgressDisplay(Protocol):
    """Shows how far a run is."""

    def update(self, completed: int, loss: float | None, note: str = "") -> None:
        """Show the number of completed steps, the last loss (None: it says nothing), and what else is to be said."""
        ...

    def close(self) -> None:
        """Show the last state and stop."""
        ...


class NoProgress:
    """Shows nothing: used on every host but the leader."""

    def update(self, completed: int, loss: float | None, note: str = "") -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


class BarProgress:
    """A bar that stays at the bottom of a terminal.

    Args:
        total: The number of steps of the run.
    """

    def __init__(self, total: int) -> None:
        self._rate = Rate()
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=rich.get_console(),
        )
        self._task = self._bar.add_task("train", total=total, said="")
        self._bar.start()

    def update(self, completed: int, loss: float | None, note: str = "") -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=completed, said=_said(loss, self._rate.add(completed), note))

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._bar.stop()


class LineProgress:
    """A line every few seconds.

    Args:
        total: The number of steps of the run.
        every_s: The time in seconds between two lines.
    """

    def __init__(self, total: int, every_s: float = 10.0) -> None:
        self._total, self._every_s, self._rate = total, every_s, Rate()
        self._shown_at = float("-inf")
        self._shown = -1
        self._last: tuple[int, float | None, float, str] = (0, None, 0.0, "")

    def update(self, completed: int, loss: float | None, note: str = "") -> None:
        """Print a line unless the last one is less than ``every_s`` old."""
        self._last = (completed, loss, self._rate.add(completed), note)
        if time.monotonic() - self._shown_at >= self._every_s:
            self._show()

    def close(self) -> None:
        """Print the last state unless it was printed already."""
        if self._shown != self._last[0]:
            self._show()

    def _show(self) -> None:
        completed, loss, rate, note = self._last
        eta = f"{_clock((self._total - completed) / rate)} left" if rate else "starting"
        # A line of a log is one line, however wide the console is taken to be.
        rich.get_console().print(
            f"step {completed}/{self._total}  {_said(loss, rate, note)}  {eta}", highlight=False, soft_wrap=True
        )
        self._shown_at, self._shown = time.monotonic(), completed


class Rate:
    """Steps per second over the last steps.

    Args:
        window: The number of last steps.
    """

    def __init__(self, window: int = 50) -> None:
        self._times: deque[tuple[float, int]] = deque(maxlen=window)

    def add(self, completed: int) -> float:
        """Note that ``completed`` steps are done now; return steps per second, 0 while that is unknown."""
        self._times.append((time.monotonic(), completed))
        (start, first), (now, last) = self._times[0], self._times[-1]
        return (last - first) / (now - start) if last > first and now > start else 0.0


def make_progress(total: int, is_leader: bool) -> ProgressDisplay:
    """Choose how to show progress.

    Args:
        total: The number of steps of the run.
        is_leader: Whether this process is the leader, which alone shows anything.

    Returns:
        A bar where the console is a terminal, else lines.
    """
    if not is_leader:
        return NoProgress()
    return BarProgress(total) if rich.get_console().is_terminal else LineProgress(total)


def _said(loss: float | None, rate: float, note: str) -> str:
    """What a line says of a step: loss, speed, and the note."""
    parts = ["" if loss is None else f"loss {_number(loss, 4)}", f"{_number(rate, 2)} steps/s", note]
    return "  ".join(filter(None, parts))


def _number(value: float, digits: int) -> str:
    """Return the number as text, a dash where there is none yet."""
    return f"{value:.{digits}f}" if value and math.isfinite(value) else UNKNOWN


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
