"""The commands that look at the results of a run: ``lockstep report``, ``tail`` and ``convert``."""

import argparse
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, NoReturn

from rich.live import Live

from lockstep.config_fields import FilePath, check_fields, option_path
from lockstep.errors import ConfigError, LockstepError
from lockstep.files import check_file
from lockstep.main.arguments import name_words, parse_arguments
from lockstep.main.commands import Arguments, seconds
from lockstep.printable import bytes_text, print_lines, show_log
from lockstep.report import (
    LineView,
    PanelView,
    RunFiles,
    Tail,
    find_run,
    make_payload,
    read_jsonl,
    render_page,
    write_inspect_log,
    write_page,
    write_parquet,
)
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
    output = options.output or _place([find_run(given) for given in options.runs])
    try:
        check_file(output)
        if options.watch:
            return watch(options.runs, output, options.interval)
        make_report([find_run(given) for given in options.runs], output)
    except OSError as error:
        raise LockstepError(f"{error}. Name a file that can be written with --output FILE.") from error
    return 0


def make_report(runs: Sequence[RunFiles], output: Path, reload_s: float | None = None) -> None:
    """Read the runs, write the page and say so; with ``reload_s`` the page loads itself again."""
    payload = make_payload(runs, reload_s=reload_s)
    title = " and ".join(run.name for run in runs)
    size = write_page(render_page(payload, title), output)
    answers = sum(len(run["when"]) for run in payload["runs"])
    steps = len({when for run in payload["runs"] for when in run["when"]})
    counts = ((len(payload["prompts"]), "prompt"), (steps, payload["axis"]), (answers, "answer"))
    counted = ", ".join(f"{number:,} {noun}{'s' * (number != 1)}" for number, noun in counts)
    print_lines(f"{output}: {counted}, {bytes_text(size)}", *(f"  {note}" for note in payload["notes"]))


def watch(given: Sequence[str], output: Path, interval_s: float, sleep: Callable[[float], object] = time.sleep) -> int:
    """Write the page again whenever a file of the runs has changed, until Ctrl-C."""
    print_lines(f"watching {' and '.join(given)} every {interval_s:g} s; Ctrl-C ends it")
    last = None
    try:
        while True:
            runs = [find_run(each) for each in given]
            stamp = [run.stamp() for run in runs]  # before reading: what is written meanwhile is seen the next time
            empty = [run.name for run in runs if not _has_rows(run)]
            if not empty and stamp != last:
                make_report(runs, output, interval_s)
                last = stamp
            elif empty and last is None:
                print_lines(f"{' and '.join(empty)}: no rows yet; waiting for the first round of samples")
                last = []
            sleep(interval_s)
    except KeyboardInterrupt:
        if last:
            make_report([find_run(each) for each in given], output)  # without the reloads
        return 0


def _has_rows(run: RunFiles) -> bool:
    """Whether a whole line is there: the first one may still be written."""
    for path in (*run.rows, *run.rollouts):
        with open(path, "rb") as file:
            if file.readline().endswith(b"\n"):
                return True
    return False


def _place(runs: Sequence[RunFiles]) -> Path:
    """The default place of the report: beside the rows of the first run."""
    first = runs[0]
    if len(runs) == 2:
        return first.directory / f"report-{_file_name(first.name)}-and-{_file_name(runs[1].name)}.html"
    whole = first.name == first.directory.resolve().name
    return first.directory / ("report.html" if whole else f"{(*first.rows, *first.rollouts)[0].stem}.html")


def _file_name(name: str) -> str:
    return name.replace("/", "-")


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


ROW_FILES = ("samples.jsonl", "tasks.jsonl", "samples/samples.jsonl")
"""The files of rows that a run directory may have: of training, of tasks, of ``lockstep sample``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Settings of ``convert``."""

    run: FilePath
    """A run directory, or a file of rows (.jsonl)."""
    format: Literal["parquet", "inspect"]
    """``parquet`` (needs pyarrow), or ``inspect``: logs of inspect_ai."""
    output: FilePath | None = None
    """The directory for what is written; null: beside the rows, logs in a directory ``inspect`` there."""

    def __post_init__(self) -> None:
        check_fields(self)


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


def convert(config: ConvertConfig) -> list[Path]:
    """Convert the rows of a run."""
    run = Path(config.run)
    files = [run] if run.is_file() else [path for name in ROW_FILES if (path := run / name).is_file()]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise ConfigError(
            f"run is {config.run!r}, which is no file of rows and has none of {', '.join(ROW_FILES)} with rows in it. "
            "Give a run directory of ours, or such a file."
        )
    written: list[Path] = []
    for path in files:
        output = path.parent if config.output is None else Path(config.output)
        output.mkdir(parents=True, exist_ok=True)
        if config.format == "parquet":
            table = output / f"{path.stem}.parquet"
            if table in written:  # of training; the other one keeps the directory that it has in the run
                table = output / path.parent.name / table.name
                table.parent.mkdir(exist_ok=True)
            written.append(write_parquet(path, table))
            continue
        name = (path.parent if path.parent.name != "samples" else path.parent.parent).resolve().name
        made = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        logs = output / "inspect" if config.output is None else output
        written += write_inspect_log(read_jsonl(path), logs, run=name, created=made)
    return written
