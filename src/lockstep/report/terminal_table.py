"""Rows of samples as a table at the terminal or in a log, whose texts can be read at every width."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.health import State
from lockstep.printable import visible, write_to_stdout
from lockstep.report.metrics import metric_means
from lockstep.report.rows import Row, SampleRow, metric_names
from lockstep.report.turns import answered, turn_lines
from lockstep.terminal import console as terminal_console

TABLE_WIDTH: Final = 72  # columns from which on rows stand in a table; below, the parts of a row stand below each other
TEXT_WIDTH: Final = 20  # columns that a prompt and a generated text have at least
_FRAME: Final = 3  # columns of a table's column beside its content: two spaces and a line


class SamplesTable:
    """A table of rows for reading: the prompt, the completion, how it ended, and its metrics.

    Nothing is left out silently: newlines and control characters are shown by a sign, a shortened text ends in the
    number of characters left out, numbers that have no column stand below the text, after ▸, and a line below the
    table counts the rows left out.

    Args:
        max_rows: The number of rows shown; the means below the table are over all rows.
        max_chars: The number of characters shown of a prompt (its end) and of a generated text (its start).
    """

    def __init__(
        self, rows: Sequence[Row | SampleRow], *, title: str, max_rows: int = 10, max_chars: int = 160
    ) -> None:
        self._rows, self._max_rows, self._max_chars = rows, max_rows, max_chars
        self._title = Text(visible(title), style="bold")
        self._metrics = metric_names(rows)
        self._several = any(row.generation_id for row in rows)
        self._unhealthy = any(map(_health, rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows below each other, as wide as there is room."""
        if options.max_width >= TABLE_WIDTH:
            yield self._table(options.max_width)
            return
        yield self._title
        indent = 2 if options.max_width >= TEXT_WIDTH + 2 else 0
        for row in self._rows[: self._max_rows]:
            prompt, text = self._texts(row)
            yield Text(f"prompt {visible(str(row.prompt_id))}:", style="dim")
            yield Padding(Text(prompt, overflow="fold"), (0, 0, 0, indent))
            yield Text("generated text:", style="dim")
            yield Padding(Text(text, overflow="fold"), (0, 0, 0, indent))
            yield Text(_line(self._numbers(row)), style="dim", overflow="fold")
            yield ""
        yield Text(self._caption(), style="italic")

    def _table(self, width: int) -> Table:
        table = Table(title=self._title, title_justify="left", box=box.ROUNDED, caption_justify="left")
        shown = self._rows[: self._max_rows]
        numbers = [self._numbers(row) for row in shown]
        names = list(numbers[0]) if numbers else []
        columns = self._columns(names, numbers, width)
        table.add_column("prompt", overflow="fold", ratio=2, min_width=TEXT_WIDTH)
        table.add_column("generated text", overflow="fold", ratio=3, min_width=TEXT_WIDTH)
        for name in columns:
            side: Literal["left", "right"] = "left" if name in ("finish", "health") else "right"
            table.add_column(Text(_heading(name)), justify=side, no_wrap=True)
        for row, values in zip(shown, numbers, strict=True):
            prompt, text = self._texts(row)
            rest = {name: value for name, value in values.items() if name not in columns}
            cell = Text(text).append(f"\n▸ {_line(rest)}", style="dim") if rest else Text(text)
            table.add_row(Text(prompt), cell, *(Text(values[name]) for name in columns))
        table.caption = Text(self._caption())
        return table

    def _columns(self, names: Sequence[str], numbers: Sequence[dict[str, str]], width: int) -> list[str]:
        """The first of the numbers' names, as many as leave the texts their width."""
        room = width - 1 - 2 * (TEXT_WIDTH + _FRAME)
        columns: list[str] = []
        for name in names:
            contents = [*_heading(name).split("\n"), *(values[name] for values in numbers)]
            room -= max(map(cell_len, contents)) + _FRAME
            if room < 0:
                break
            columns.append(name)
        return columns

    def _numbers(self, row: Row | SampleRow) -> dict[str, str]:
        """The numbers of a row and how it ended, as texts by their names."""
        sample = {"sample": str(row.generation_id)} if self._several else {}
        values = {name: row.metrics.get(name) for name in self._metrics}
        return {
            **sample,
            "tokens": str(row.num_tokens),
            "finish": visible(row.finish_reason),
            **({"health": visible(_health(row))} if self._unhealthy else {}),
            **{visible(name): "–" if value is None else f"{value:.3g}" for name, value in values.items()},
        }

    def _texts(self, row: Row | SampleRow) -> Iterator[str]:
        yield _shortened(row.prompt, self._max_chars, keep_end=True)
        lines = turn_lines(answered(row.turns)) if row.turns else [row.generated_text]
        yield "\n".join(_shortened(line, self._max_chars, keep_end=False) for line in lines)

    def _caption(self) -> str:
        rows, shown = self._rows, self._max_rows
        counted = f"{shown} of {len(rows)} rows" if len(rows) > shown else f"{len(rows)} row{'s' * (len(rows) != 1)}"
        means = []
        for name, mean in metric_means(rows).items():
            measured = sum(row.metrics.get(name) is not None for row in rows)
            means.append(f"mean {visible(name)} {mean:.3g}" + (f" of {measured}" if measured < len(rows) else ""))
        return " · ".join([counted, *means])


def print_table(
    rows: Sequence[Row | SampleRow], *, title: str, max_rows: int = 10, console: Console | None = None
) -> None:
    """Print the table below an empty line.

    Args:
        console: The console to print to; None: standard output, as wide as the terminal or the environment variable
            ``COLUMNS`` says, else 80 characters.
    """
    table = SamplesTable(rows, title=title, max_rows=max_rows)
    if console is not None:
        console.print("", table)
    else:
        write_to_stdout(lambda: terminal_console().print("", table))


def _health(row: Row | SampleRow) -> str:
    """The states of an answer, but for the one that its finish reason says."""
    return " ".join(state for state in (row.health or "").split() if state != State.CUT)


def _heading(name: str) -> str:
    """A name over a narrow column: its words below each other."""
    return name.replace("_", "\n")


def _line(numbers: dict[str, str]) -> str:
    return " · ".join(f"{name} {value}" for name, value in numbers.items())


def _shortened(text: str, limit: int, *, keep_end: bool) -> str:
    shown = visible(text)
    if len(shown) <= limit:
        return shown
    left_out = f"{len(shown) - limit} more characters"
    return f"({left_out}) …{shown[-limit:]}" if keep_end else f"{shown[:limit]}… ({left_out})"
