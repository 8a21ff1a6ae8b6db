"""What the page shows, as one JSON object: columns of numbers and tables of distinct texts, so that it stays small."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.errors import LockstepError
from lockstep.report.html.series import Series, read_series
from lockstep.report.run_files import RunFiles, require_rows
from lockstep.report.saved_rows import SavedRow, read_rows

FORMAT = 1
"""The number of this layout, which the page's script expects."""
_DIGITS = 6
"""Significant digits of the numbers in the page."""


def make_payload(runs: Sequence[RunFiles], *, reload_s: float | None = None) -> dict[str, Any]:
    """Read one run, or two to be shown side by side.

    Args:
        runs: The files of the runs.
        reload_s: The seconds after which the page loads itself again; None for a page that stays as it is.

    Returns:
        The object that the page's script reads, without anything that JSON cannot express.

    Raises:
        ConfigError: A run has no rows.
        LockstepError: A row or a metric cannot be read, or the runs do not go together.
    """
    for run in runs:
        require_rows(run)
    rows = [[row for path in run.rows for row in read_rows(path)] for run in runs]
    for run, found in zip(runs, rows, strict=True):
        if not found:
            raise LockstepError(f"{_paths(run)} has no rows yet. Wait for the run's first round of samples.")
    axes = {row.axis: run.name for run, found in zip(runs, rows, strict=True) for row in found}
    if len(axes) > 1:
        raise LockstepError(
            f"rows with a step ({axes['step']}) and rows with a round ({axes['round']}) cannot be shown together. "
            "Make a report of each."
        )
    prompts = _Prompts()
    notes: list[str] = []
    shown = [_run(run, found, prompts, notes) for run, found in zip(runs, rows, strict=True)]
    return {
        "format": FORMAT,
        "axis": next(iter(axes)),
        "made": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "reload_s": reload_s,
        "prompts": prompts.table,
        "runs": shown,
        "notes": notes,
    }


class _Prompts:
    """The prompts of all runs, each once, in order of first appearance.

    A prompt of a run is the same as one of another run when its text is; within a run, equal texts with several
    numbers are several prompts, and so are several texts that had the same number one after the other.
    """

    def __init__(self) -> None:
        self.table: list[dict[str, Any]] = []
        """Each prompt's ``key`` in the address, its ``id`` as the run has it, and its ``text``."""
        self._keys: set[str] = set()

    def places(self, rows: Iterable[SavedRow]) -> list[int]:
        """The place in the table of each row's prompt."""
        others: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.table):
            others.setdefault(prompt["text"], []).append(place)
        own: dict[tuple[int | str, str], int] = {}
        found = []
        for row in rows:
            identity = (row.prompt_id, row.prompt)
            if identity not in own:
                same = others.get(row.prompt)
                own[identity] = same.pop(0) if same else self._add(row)
            found.append(own[identity])
        return found

    def _add(self, row: SavedRow) -> int:
        key, number = str(row.prompt_id), 1
        while key in self._keys:
            number += 1
            key = f"{row.prompt_id}.{number}"
        self._keys.add(key)
        self.table.append({"key": key, "id": row.prompt_id, "text": row.prompt})
        return len(self.table) - 1


class _Texts:
    """Distinct texts, each with a number: a model that has learned something says the same at every step."""

    def __init__(self) -> None:
        self.table: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.table)
            self.table.append(text)
        return self._places[text]


def _run(run: RunFiles, rows: Sequence[SavedRow], prompts: _Prompts, notes: list[str]) -> dict[str, Any]:
    places = prompts.places(rows)
    last = {
        (row.when, place, row.generation_id): number
        for number, (row, place) in enumerate(zip(rows, places, strict=True))
    }
    if len(last) < len(rows):
        notes.append(
            f"{run.name}: {len(rows) - len(last):,} rows are not shown, because a later row has the same "
            f"{rows[0].axis}, prompt and generation."
        )
    kept = sorted(last.values())
    shown = [rows[number] for number in kept]
    texts, reasons = _Texts(), _Texts()
    series = read_series(run.metrics)
    for name, curve in series.items():
        if curve.points > len(curve.steps):
            notes.append(f"{run.name}: the curve {name} shows {len(curve.steps):,} of its {curve.points:,} points.")
    return {
        "name": run.name,
        "files": [path.name for path in (*run.rows, *run.metrics)],
        "when": [row.when for row in shown],
        "prompt": [places[number] for number in kept],
        "generation": [row.generation_id for row in shown],
        "text": [texts.place(row.generated_text) for row in shown],
        "texts": texts.table,
        "reason": [reasons.place(row.finish_reason) for row in shown],
        "reasons": reasons.table,
        "numbers": {name: [_plain(row.numbers.get(name)) for row in shown] for name in _names(shown, "numbers")},
        "words": {name: [row.texts.get(name) for row in shown] for name in _names(shown, "texts")},
        "tokens": {
            str(number): {"texts": [text for text, _ in row.tokens], "logprobs": [_plain(p) for _, p in row.tokens]}
            for number, row in enumerate(shown)
            if row.tokens
        },
        "series": {name: _series(curve) for name, curve in series.items()},
    }


def _names(rows: Iterable[SavedRow], kind: str) -> list[str]:
    """The names of the columns of a kind, metrics before what every row has."""
    names = dict.fromkeys(name for row in rows for name in getattr(row, kind))
    return sorted(names, key=lambda name: name in ("num_tokens", "mean_logprob"))


def _series(curve: Series) -> dict[str, Any]:
    return {"steps": list(curve.steps), "values": [_plain(value) for value in curve.values]}


def _plain(value: float | None) -> float | int | str | None:
    """A number as short as it is useful, whole ones without a point; one that JSON cannot express by its name."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def _paths(run: RunFiles) -> str:
    return ", ".join(str(path) for path in run.rows)
