"""The newest of a run at a terminal, or as lines in a log."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lockstep.printable import visible
from lockstep.report.saved_rows import SavedRow
from lockstep.report.table import terminal_table
from lockstep.report.tail import MetricsRecord, Tail

MAX_CHARS = 160
"""Characters of a prompt or an answer on a line."""
BARS = 12
"""Values of a trend that are shown, the newest at its end."""
_BARS = "▁▂▃▄▅▆▇█"
_FRAME = 6
"""Lines of a screen that are neither metrics nor samples: frames, titles, the cursor."""


class PanelView:
    """The metrics with their trends, and below them the newest samples.

    Args:
        tail: The run.
        rows: Samples of a step that are shown.
    """

    def __init__(self, tail: Tail, rows: int) -> None:
        self._tail, self._rows = tail, rows

    def render(self, console: Console) -> RenderableType:
        """What is shown now.

        Args:
            console: The terminal, which says how much there is room for.
        """
        tail = self._tail
        parts: list[RenderableType] = [self._metrics(console)]
        if tail.newest:
            title = f"what the model says at {tail.axis} {tail.newest[-1].when:,}"
            rows = [row.to_row() for row in tail.newest]
            parts.append(terminal_table(rows, title=title, max_rows=self._rows, max_chars=MAX_CHARS))
        else:
            parts.append(Text("no samples yet", style="dim"))
        return Group(*parts)

    def _metrics(self, console: Console) -> RenderableType:
        tail = self._tail
        columns = 2 if console.width >= 110 else 1
        room = max(4, console.height - _FRAME - 3 * min(self._rows, len(tail.newest))) * columns
        names = list(tail.metrics)[:room]
        grid = Table.grid(padding=(0, 2), expand=True)
        for _ in range(columns):
            grid.add_column(style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
            grid.add_column(justify="right", no_wrap=True)
            grid.add_column(no_wrap=True, min_width=BARS)
        lines = -(-len(names) // columns)
        for line in range(lines):
            cells: list[Text] = []
            for name in names[line::lines]:
                _, value = tail.metrics[name]
                bars = trend(list(tail.trends.get(name, ()))[-BARS:])
                cells += [Text(visible(name)), Text(number_text(value)), Text(bars)]
            grid.add_row(*cells)
        step = max((step for step, _ in tail.metrics.values()), default=None)
        title = visible(tail.name) if step is None else f"{visible(tail.name)} · step {step:,}"
        left_out = len(tail.metrics) - len(names)
        below = Text(f"{left_out} more metrics; a higher window shows them", style="dim") if left_out > 0 else None
        body = grid if names else Text("no metrics yet", style="dim")
        return Panel(Group(body, below) if below else body, title=Text(title), title_align="left", box=box.ROUNDED)


class LineView:
    """A line per sample and per set of metrics. What was there before the first look is shown in brief.

    Args:
        tail: The run.
        rows: Samples of a step that are shown.
        console: Where lines are printed.
    """

    def __init__(self, tail: Tail, rows: int, console: Console) -> None:
        self._tail, self._rows, self._console = tail, rows, console
        self._first = True

    def show(self) -> None:
        """Print what the last look found."""
        tail = self._tail
        if tail.taken_back:
            self._print(f"the run went back: {tail.taken_back:,} lines were taken back")
        if self._first and (tail.metrics or tail.newest):
            self._first = False
            newest: dict[int, dict[str, float | str]] = {}
            for name, (step, value) in tail.metrics.items():
                newest.setdefault(step, {})[name] = value
            for step in sorted(newest):
                self._print(metrics_line(MetricsRecord(step=step, values=newest[step])))
            self._print_rows(tail.newest)
            return
        for record in tail.new_metrics:
            self._print(metrics_line(record))
        by_step: dict[int, list[SavedRow]] = {}
        for row in tail.new_rows:
            by_step.setdefault(row.when, []).append(row)
        for rows in by_step.values():
            self._print_rows(rows)

    def _print_rows(self, rows: Sequence[SavedRow]) -> None:
        for row in rows[: self._rows]:
            self._print(row_line(row))
        if len(rows) > self._rows:
            self._print(f"{rows[0].axis} {rows[0].when}  … {len(rows) - self._rows:,} more of {len(rows):,} samples")

    def _print(self, line: str) -> None:
        # Lines of a log are not wrapped at the width of a terminal that is not there.
        self._console.print(Text(line), soft_wrap=True)
        self._console.file.flush()


def row_line(row: SavedRow) -> str:
    """A sample on one line.

    Args:
        row: The sample.
    """
    numbers = "  ".join(f"{visible(name)} {number_text(value)}" for name, value in row.numbers.items())
    texts = "  ".join(f"{visible(name)} {_short(text)}" for name, text in row.texts.items())
    about = "  ".join(part for part in (row.finish_reason and visible(row.finish_reason), numbers, texts) if part)
    prompt = f"#{visible(str(row.prompt_id))}.{row.generation_id}"
    return f"{row.axis} {row.when}  {prompt}  {_short(row.prompt)} → {_short(row.generated_text)}  [{about}]"


def metrics_line(record: MetricsRecord) -> str:
    """A set of metrics on one line.

    Args:
        record: The metrics.
    """
    values = "  ".join(f"{visible(name)} {number_text(value)}" for name, value in record.values.items())
    return f"step {record.step}  {values}"


def number_text(value: float | str | None) -> str:
    """A number for reading, with four digits; a text as it is.

    Args:
        value: The number; None where there is none.
    """
    if value is None:
        return "–"
    if isinstance(value, str):
        return visible(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.4g}"


def trend(values: Sequence[float]) -> str:
    """Some values as small bars, the lowest and the highest of them at the ends of their range.

    Args:
        values: The values; those that are not finite are gaps.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    if span == 0:
        return _BARS[0] * len(values)
    return "".join(
        _BARS[round((value - low) / span * (len(_BARS) - 1))] if math.isfinite(value) else " " for value in values
    )


def _short(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= MAX_CHARS else f"{shown[:MAX_CHARS]}… ({len(shown) - MAX_CHARS} more characters)"
