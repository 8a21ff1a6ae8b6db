"""The newest rows and metrics of a run that goes on, at a terminal or as lines in a log."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lockstep.errors import ConfigError
from lockstep.printable import visible
from lockstep.report.health_strips import ToldAlarm, lasting_states
from lockstep.report.jsonl import parse_record
from lockstep.report.saved_rows import SavedRow, find_run, parse_row
from lockstep.report.terminal_table import SamplesTable

_CHECKED: Final = 256  # bytes before the place read up to that must still be there, or the file is another one


class FollowedFile:
    """Reads what is appended to a file, by offset; all of it where what was read is not there any more.

    A run that goes on from a checkpoint writes its files anew without what came after it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._lines, self._before = 0, 0, b""

    def look(self, *, at_end: bool = False) -> tuple[bool, list[tuple[str, dict[str, Any]]]]:
        """Return whether all of it was read again, and the records that are new, each with its place for errors.

        Args:
            at_end: Whether nobody writes any more, so that a last line may lack its newline.
        """
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:  # not written yet
            return False, []
        with file:
            file.seek(self._offset - len(self._before))
            again = file.read(len(self._before)) != self._before
            if again:
                self._offset = self._lines = 0
            file.seek(self._offset)
            content = file.read()
            end = len(content) if at_end and content[-1:] == b"}" else content.rfind(b"\n") + 1
            self._offset += end
            file.seek(max(0, self._offset - _CHECKED))
            self._before = file.read(self._offset - file.tell())
        lines = content[:end].removesuffix(b"\n").split(b"\n") if end else []
        places = [(f"{self.path}:{number}", line) for number, line in enumerate(lines, self._lines + 1)]
        self._lines += len(lines)
        return again, [(place, parse_record(line, place)) for place, line in places if line.strip()]


TREND: Final = 64  # the last values of a metric that are kept, for its trend


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """Metrics that a run logged at once."""

    step: int
    values: dict[str, float | str]


class Tail:
    """Follows the files of a run.

    Args:
        must_be_there: Whether a run without any file is an error, and not one to wait for.

    Raises:
        ConfigError: There is no such run.
    """

    def __init__(self, run_name: str, *, must_be_there: bool = False) -> None:
        self._name = run_name
        self._files: dict[Path, FollowedFile] = {}
        self.name = find_run(run_name).name
        self.axis: str = "step"
        self.newest: list[SavedRow] = []  # the rows of the step that was sampled last
        self.metrics: dict[str, tuple[int, float | str]] = {}
        """The newest value of each metric with its step, in order of first appearance."""
        self.trends: dict[str, collections.deque[float]] = {}  # the last values of each metric that is a number
        self.new_rows: list[SavedRow] = []  # the rows that the last look found
        self.new_metrics: list[MetricsRecord] = []  # the metrics that the last look found
        self.alarms: dict[tuple[str, str], ToldAlarm] = {}
        """The last alarm of each state that is still there, by the name of the rounds and the state."""
        self.new_alarms: list[ToldAlarm] = []  # the alarms that the last look found
        self.went_back = False  # whether the last look found lines no more, because the run went back to a checkpoint
        if must_be_there:
            run = find_run(run_name)
            if not (run.rows or run.rollouts or run.metrics):
                raise ConfigError(
                    f"{run_name} has no samples.jsonl, rollouts.jsonl or metrics.jsonl. Name the directory of a run, "
                    "or leave out --no-follow to wait for its first round of samples."
                )

    def look(self, *, at_end: bool = False) -> bool:
        """Read what is new; return whether anything is.

        Args:
            at_end: Whether nobody writes any more, so that a last line may lack its newline.
        """
        run, health = find_run(self._name), list[dict[str, Any]]()
        self.new_rows, self.new_metrics = [], []
        answers = run.rows or run.rollouts
        paths = (*answers, *run.metrics, *run.health)
        news = {path: self._files.setdefault(path, FollowedFile(path)).look(at_end=at_end) for path in paths}
        self.went_back = any(again for again, _ in news.values())
        if self.went_back:
            self.newest, self.metrics, self.trends, self.alarms = [], {}, {}, {}
            self._files = {path: FollowedFile(path) for path in paths}
            news = {path: file.look(at_end=at_end) for path, file in self._files.items()}
        for path, (_, records) in news.items():
            if path in answers:
                self.new_rows += [parse_row(record, place) for place, record in records]
            elif path in run.health:
                health = [record for _, record in records]
            else:
                self.new_metrics += [metrics for _, record in records if (metrics := metrics_record(record))]
        self.new_alarms = [alarm for record in health if (alarm := ToldAlarm.from_record(record))]
        self._add(self.new_rows, self.new_metrics, health)
        return bool(self.new_rows or self.new_metrics or health or self.went_back)

    def _add(
        self, rows: Iterable[SavedRow], metrics: Iterable[MetricsRecord], health: Iterable[Mapping[str, Any]]
    ) -> None:
        for line in health:
            if alarm := ToldAlarm.from_record(line):
                self.alarms[alarm.name, alarm.state] = alarm
            elif (lasting := lasting_states(line)) is not None:
                gone = [key for key in self.alarms if key[0] == line.get("name") and key[1] not in lasting]
                for key in gone:
                    del self.alarms[key]
        for row in rows:
            if self.newest and self.newest[-1].when != row.when:
                self.newest = []
            self.axis = row.axis
            self.newest.append(row)
        for record in metrics:
            for name, value in record.values.items():
                self.metrics[name] = (record.step, value)
                if not isinstance(value, str):
                    self.trends.setdefault(name, collections.deque(maxlen=TREND)).append(float(value))


def metrics_record(record: Mapping[str, Any]) -> MetricsRecord | None:
    """The metrics of a line; None where it has no step."""
    step = record.get("step")
    if not isinstance(step, int):
        return None
    own = ("step", "time")
    values = {name: value for name, value in record.items() if name not in own and isinstance(value, int | float | str)}
    return MetricsRecord(step=step, values=values)


MAX_CHARS = 160  # characters of a prompt or an answer on a line
BARS = 12  # values of a trend that are shown, the newest at its end
_BARS = "▁▂▃▄▅▆▇█"
_FRAME = 6  # lines of a screen that are neither metrics nor samples: frames, titles, the cursor


class PanelView:
    """The metrics with their trends, and below them the newest samples."""

    def __init__(self, tail: Tail, rows: int) -> None:
        self._tail, self._rows = tail, rows

    def render(self, console: Console) -> RenderableType:
        """Metrics and samples as they are now."""
        tail = self._tail
        lines = [f"▲ {visible(alarm.text)}" for alarm in tail.alarms.values()]
        parts: list[RenderableType] = [
            *(Text(line, style="bold red", no_wrap=True, overflow="ellipsis") for line in lines),
            self._metrics(console),
        ]
        if tail.newest:
            title = f"what the model says at {tail.axis} {tail.newest[-1].when:,}"
            rows = [row.to_row() for row in tail.newest]
            parts.append(SamplesTable(rows, title=title, max_rows=self._rows, max_chars=MAX_CHARS))
        else:
            parts.append(Text("no samples yet", style="dim"))
        return Group(*parts)

    def _metrics(self, console: Console) -> RenderableType:
        tail = self._tail
        columns = 2 if console.width >= 110 else 1
        used = _FRAME + len(tail.alarms) + 3 * min(self._rows, len(tail.newest))
        room = max(4, console.height - used) * columns
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
    """A line per sample and per set of metrics. What was there before the first look, or is left, is shown in brief."""

    def __init__(self, tail: Tail, rows: int, console: Console) -> None:
        self._tail, self._rows, self._console = tail, rows, console
        self._first = True

    def show(self) -> None:
        """Print what the last look found."""
        tail = self._tail
        if tail.went_back:
            self._print("the run went back to a checkpoint; what is left:")
            self._first = True
        if self._first and (tail.metrics or tail.newest):
            self._first = False
            newest: dict[int, dict[str, float | str]] = {}
            for name, (step, value) in tail.metrics.items():
                newest.setdefault(step, {})[name] = value
            for step in sorted(newest):
                self._print(metrics_line(MetricsRecord(step=step, values=newest[step])))
            self._print_rows(tail.newest)
            self._print_alarms(tail.alarms.values())
            return
        for record in tail.new_metrics:
            self._print(metrics_line(record))
        by_step: dict[int, list[SavedRow]] = {}
        for row in tail.new_rows:
            by_step.setdefault(row.when, []).append(row)
        for rows in by_step.values():
            self._print_rows(rows)
        self._print_alarms(tail.new_alarms)

    def _print_alarms(self, alarms: Iterable[ToldAlarm]) -> None:
        for alarm in alarms:
            self._print(f"▲ {visible(alarm.text)}")

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
    """A sample on one line."""
    numbers = "  ".join(f"{visible(name)} {number_text(value)}" for name, value in row.numbers.items())
    texts = "  ".join(f"{visible(name)} {_short(text)}" for name, text in row.texts.items())
    about = "  ".join(part for part in (row.finish_reason and visible(row.finish_reason), numbers, texts) if part)
    prompt = f"#{visible(str(row.prompt_id))}.{row.generation_id}"
    return f"{row.axis} {row.when}  {prompt}  {_short(row.prompt)} → {_short(row.shown)}  [{about}]"


def metrics_line(record: MetricsRecord) -> str:
    """A set of metrics on one line."""
    values = "  ".join(f"{visible(name)} {number_text(value)}" for name, value in record.values.items())
    return f"step {record.step}  {values}"


def number_text(value: float | str | None) -> str:
    """A number for reading, with four digits; a text as it is."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return visible(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.4g}"


def trend(values: Sequence[float]) -> str:
    """Some values as small bars, the lowest and the highest of them at the ends of their range."""
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
