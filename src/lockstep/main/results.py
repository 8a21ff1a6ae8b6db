"""The commands that look at the results of a run: ``lockstep report``, ``tail`` and ``convert``."""

import argparse
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from rich.live import Live

from lockstep.config_fields import option_path
from lockstep.errors import ConfigError, LockstepError
from lockstep.files import check_file
from lockstep.main.arguments import name_words, parse_arguments
from lockstep.main.commands import Arguments, seconds
from lockstep.printable import print_lines, show_log
from lockstep.report import ConvertConfig, LineView, PanelView, Tail, convert, find_run, make_report, page_path, watch
from lockstep.terminal import Console

RELOAD_S: Final = 10.0  # seconds between two looks at a run that is watched, and between two reloads of its page


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run, and another one to compare it with")
    output = parser.add_argument("--output", "-o", type=option_path, metavar="FILE")
    output.help = "the file (default: report.html of the run)"
    parser.add_argument("--watch", action="store_true", help="write it again whenever the run has written something")
    parser.add_argument(
        "--interval", type=seconds, default=RELOAD_S, metavar="S", help="seconds between two looks (default: 10)"
    )


def run_report(arguments: Sequence[str]) -> int:
    """Make the report."""
    parser = Arguments("report", add_report_options)
    options = parser.parse_args(list(arguments))
    if len(options.runs) not in (1, 2):
        parser.error(f"name one run, or two to compare; {len(options.runs)} were given")
    output = options.output or page_path([find_run(run) for run in options.runs])
    try:
        check_file(output)
        if options.watch:
            return watch(options.runs, output, options.interval)
        make_report([find_run(run) for run in options.runs], output)
    except OSError as error:
        raise LockstepError(f"{error}. Name a file that can be written with --output FILE.") from error
    return 0


def add_tail_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="samples of a step to show (default: 8)")
    follow = parser.add_mutually_exclusive_group()
    follow.add_argument("--follow", action="store_true", default=True, help="go on until Ctrl-C (the default)")
    follow.add_argument("--no-follow", action="store_false", dest="follow", help="show what is there and end")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="seconds between two looks (default: 1)"
    )


def run_tail(
    arguments: Sequence[str], *, console: Console | None = None, sleep: Callable[[float], object] = time.sleep
) -> int:
    """Show a run until Ctrl-C, or once."""
    parser = Arguments("tail", add_tail_options)
    options = parser.parse_args(list(arguments))
    if options.run is None:
        parser.error("name a run")
    if options.rows < 1:
        parser.error(f"--rows is {options.rows}; it must be at least 1")
    console = console or Console()
    tail = Tail(options.run, must_be_there=not options.follow)
    if not options.follow:
        tail.look(at_end=True)
        if console.is_terminal:
            console.print(PanelView(tail, options.rows).render(console))
        else:
            LineView(tail, options.rows, console).show()
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(tail, options.rows, console, lambda: sleep(options.interval))
    return 0


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


def run_convert(arguments: Sequence[str]) -> int:
    """Convert as the command line says."""
    words = name_words(arguments, ["run"], "lockstep convert RUN [--key VALUE ...]")
    show_log(logging.INFO)
    try:
        written = convert(parse_arguments(ConvertConfig, words))
    except OSError as error:
        raise ConfigError(f"{error}. Name a directory that can be written with --output PATH.") from error
    print_lines(*written)
    return 0
