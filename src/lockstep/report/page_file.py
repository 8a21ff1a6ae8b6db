"""``lockstep report``: the page of one run or two as a file, made once or whenever the runs have written something."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.printable import bytes_text, print_lines
from lockstep.report.page import make_payload, render_page, write_page
from lockstep.report.saved_rows import RunFiles, find_run


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


def watch(names: Sequence[str], output: Path, interval_s: float, sleep: Callable[[float], object] = time.sleep) -> int:
    """Write the page again whenever a file of the runs has changed, until Ctrl-C."""
    print_lines(f"watching {' and '.join(names)} every {interval_s:g} s; Ctrl-C ends it")
    last = None
    try:
        while True:
            runs = [find_run(name) for name in names]
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
            make_report([find_run(name) for name in names], output)  # without the reloads
        return 0


def _has_rows(run: RunFiles) -> bool:
    """Whether a whole line is there: the first one may still be written."""
    for path in (*run.rows, *run.rollouts):
        with open(path, "rb") as file:
            if file.readline().endswith(b"\n"):
                return True
    return False


def page_path(runs: Sequence[RunFiles]) -> Path:
    """The default place of the report: beside the rows of the first run."""
    first = runs[0]
    if len(runs) == 2:
        return first.directory / f"report-{_file_name(first.name)}-and-{_file_name(runs[1].name)}.html"
    whole = first.name == first.directory.resolve().name
    return first.directory / ("report.html" if whole else f"{(*first.rows, *first.rollouts)[0].stem}.html")


def _file_name(name: str) -> str:
    return name.replace("/", "-")
