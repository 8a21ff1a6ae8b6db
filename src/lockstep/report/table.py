"""The samples table at the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.printable import visible
from lockstep.report.metrics import metric_means
from lockstep.report.rows import Row, SampleRow, metric_names


def terminal_table(rows: Sequence[Row | SampleRow], *, title: str, max_rows: int = 10, max_chars: int = 160) -> Table:
    """A table of rows for reading: the prompt, the completion, how it ended, and its metrics.

    Nothing is left out silently: newlines and control characters are shown by a sign, a shortened text ends in the
    number of characters left out, and a line below the table counts the rows left out.

    Args:
        max_rows: The number of rows shown; the means below the table are over all rows.
        max_chars: The number of characters shown of a prompt (its end) and of a generated text (its start).
    """
    names = metric_names(rows)
    several = any(row.generation_id for row in rows)
    table = Table(
        title=Text(visible(title), style="bold"), title_justify="left", box=box.ROUNDED, caption_justify="left"
    )
    table.add_column("prompt", overflow="fold", ratio=2)
    if several:
        table.add_column("sample", justify="right", no_wrap=True)
    table.add_column("generated text", overflow="fold", ratio=3)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("finish", no_wrap=True)
    for name in names:
        table.add_column(Text("\n".join(map(visible, name.split("_")))), justify="right", no_wrap=True)
    for row in rows[:max_rows]:
        values = [row.metrics.get(name) for name in names]
        table.add_row(
            Text(_shortened(row.prompt, max_chars, keep_end=True)),
            *([Text(str(row.generation_id))] if several else []),
            Text(_shortened(row.generated_text, max_chars, keep_end=False)),
            Text(str(row.num_tokens)),
            Text(visible(row.finish_reason)),
            *(Text("–" if value is None else f"{value:.3g}") for value in values),
        )
    table.caption = Text(_below(rows, max_rows))
    return table


def print_table(
    rows: Sequence[Row | SampleRow], *, title: str, max_rows: int = 10, console: Console | None = None
) -> None:
    """Print the table below an empty line.

    Args:
        console: The console to print to; None: standard output, as wide as the terminal or the environment variable
            ``COLUMNS`` says, else 80 characters.
    """
    (console or Console()).print("", terminal_table(rows, title=title, max_rows=max_rows))


def _shortened(text: str, limit: int, *, keep_end: bool) -> str:
    shown = visible(text)
    if len(shown) <= limit:
        return shown
    left_out = f"{len(shown) - limit} more characters"
    return f"({left_out}) …{shown[-limit:]}" if keep_end else f"{shown[:limit]}… ({left_out})"


def _below(rows: Sequence[Row | SampleRow], max_rows: int) -> str:
    shown = f"{max_rows} of {len(rows)} rows" if len(rows) > max_rows else f"{len(rows)} row{'s' * (len(rows) != 1)}"
    means = []
    for name, mean in metric_means(rows).items():
        measured = sum(row.metrics.get(name) is not None for row in rows)
        means.append(f"mean {visible(name)} {mean:.3g}" + (f" of {measured}" if measured < len(rows) else ""))
    return " · ".join([shown, *means])
