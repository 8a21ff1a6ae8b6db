"""``lockstep tail``: the newest samples and metrics of a run, live at a terminal or as lines in a log."""

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from rich.console import Console
from rich.live import Live

from lockstep.main.commands import Arguments, seconds
from lockstep.report import LineView, PanelView, Tail

TEXT: Final = """\
Shows the newest samples and the newest value of every metric of a run, and goes on as the run does.
At a terminal they stay in place; in a log every new sample and every new set of metrics is a line.

RUN is a run's directory (runs/my-run), or a file of its rows."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="samples of a step to show (default: 8)")
    follow = parser.add_mutually_exclusive_group()
    follow.add_argument("--follow", action="store_true", default=True, help="go on until Ctrl-C (the default)")
    follow.add_argument("--no-follow", action="store_false", dest="follow", help="show what is there and end")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="seconds between two looks (default: 1)"
    )


def main(
    arguments: Sequence[str], *, console: Console | None = None, sleep: Callable[[float], object] = time.sleep
) -> int:
    """Show a run until Ctrl-C, or once.

    Args:
        console: Where it is shown; None: standard output.
        sleep: Waits for some seconds.

    Returns:
        The exit code, 0.

    Raises:
        LockstepError: There is no such run, or a line of it cannot be read.
    """
    parser = Arguments("tail", TEXT)
    add_options(parser)
    options = parser.parse_args(list(arguments))
    if options.help:
        print(parser.format_help())
        return 0
    if options.run is None:
        parser.error("name a run")
    if options.rows < 1:
        parser.error(f"--rows is {options.rows}; it must be at least 1")
    console = console or Console(highlight=False)
    tail = Tail(options.run, must_be_there=not options.follow)
    if not options.follow:
        tail.look(at_end=True)
        _show_once(tail, options.rows, console)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(tail, options.rows, console, lambda: sleep(options.interval))
    return 0


def _show_once(tail: Tail, rows: int, console: Console) -> None:
    if console.is_terminal:
        console.print(PanelView(tail, rows).render(console))
    else:
        LineView(tail, rows, console).show()


def _follow(tail: Tail, rows: int, console: Console, wait: Callable[[], object]) -> NoReturn:
    if not console.is_terminal:
        lines = LineView(tail, rows, console)
        while True:
            tail.look()
            lines.show()
            wait()
    panel = PanelView(tail, rows)
    with Live(panel.render(console), console=console, auto_refresh=False) as live:
        while True:
            if tail.look():
                live.update(panel.render(console), refresh=True)
            wait()
