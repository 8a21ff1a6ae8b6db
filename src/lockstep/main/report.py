"""``lockstep report``: a run as one HTML file."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lockstep.errors import LockstepError
from lockstep.main.commands import Arguments, seconds
from lockstep.printable import bytes_text
from lockstep.report import RunFiles, find_run, make_payload, render_page, write_page

TEXT: Final = """\
Makes one HTML file of a run: what the model said to every prompt at every step, what changed, the curves.
It needs no network and nothing beside it, so it can be mailed. Two runs are shown side by side.

RUN is a run's directory (runs/my-run), or a file of rows such as samples.jsonl or rollouts.jsonl."""
RELOAD_S: Final = 10.0
"""Seconds between two looks at a run that is watched, and between two reloads of its page."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run, and another one to compare it with")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="the file (default: report.html of the run)")
    parser.add_argument("--watch", action="store_true", help="write it again whenever the run has written something")
    parser.add_argument(
        "--interval", type=seconds, default=RELOAD_S, metavar="S", help="seconds between two looks (default: 10)"
    )


def main(arguments: Sequence[str]) -> int:
    """Make the report.

    Returns:
        The exit code, 0.

    Raises:
        LockstepError: A run is not there, a line of it cannot be read, or the report cannot be written.
    """
    parser = Arguments("report", TEXT)
    add_options(parser)
    options = parser.parse_args(list(arguments))
    if options.help:
        print(parser.format_help())
        return 0
    if len(options.runs) not in (1, 2):
        parser.error(f"name one run, or two to compare; {len(options.runs)} were given")
    output = options.output or _place([find_run(given) for given in options.runs])
    try:
        if options.watch:
            return watch(options.runs, output, options.interval)
        make_report([find_run(given) for given in options.runs], output)
    except OSError as error:
        raise LockstepError(f"{error}. Name a file that can be written with --output FILE.") from error
    return 0


def make_report(runs: Sequence[RunFiles], output: Path, reload_s: float | None = None) -> None:
    """Read the runs, write the page and say so.

    Args:
        reload_s: The seconds after which the page loads itself again; None: it stays as it is.

    Raises:
        LockstepError: A line of a run cannot be read.
        OSError: The page cannot be written.
    """
    payload = make_payload(runs, reload_s=reload_s)
    title = " and ".join(run.name for run in runs)
    size = write_page(render_page(payload, title), output)
    answers = sum(len(run["when"]) for run in payload["runs"])
    steps = len({when for run in payload["runs"] for when in run["when"]})
    counts = ((len(payload["prompts"]), "prompt"), (steps, payload["axis"]), (answers, "answer"))
    counted = ", ".join(f"{number:,} {noun}{'s' * (number != 1)}" for number, noun in counts)
    print(f"{output}: {counted}, {bytes_text(size)}", flush=True)
    for note in payload["notes"]:
        print(f"  {note}", flush=True)


def watch(given: Sequence[str], output: Path, interval_s: float, sleep: Callable[[float], object] = time.sleep) -> int:
    """Write the page again whenever a file of the runs has changed, until Ctrl-C.

    Args:
        given: The runs as they were named; their files need not be there yet.
        interval_s: The seconds between two looks, and between two reloads of the page.
        sleep: Waits for some seconds.

    Returns:
        The exit code, 0.

    Raises:
        LockstepError: A line of a run cannot be read.
        OSError: The page cannot be written.
    """
    print(f"watching {' and '.join(given)} every {interval_s:g} s; Ctrl-C ends it", flush=True)
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
                print(f"{' and '.join(empty)}: no rows yet; waiting for the first round of samples", flush=True)
                last = []
            sleep(interval_s)
    except KeyboardInterrupt:
        if last:
            make_report([find_run(each) for each in given], output)  # without the reloads
        return 0


def _has_rows(run: RunFiles) -> bool:
    """Whether a whole line is there: the first one may still be written."""
    for path in run.rows:
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
    return first.directory / ("report.html" if whole else f"{first.rows[0].stem}.html")


def _file_name(name: str) -> str:
    return name.replace("/", "-")
