"""One HTML file that needs nothing else: template, style, script and data, which a content-security policy seals.

Everything that a model or a file says is data: it is in one JSON block, and the script shows it as text.
"""

import base64
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.files import write_file
from lockstep.report.health_strips import read_strips
from lockstep.report.jsonl import as_float, named_float, numbered_records
from lockstep.report.saved_rows import TRACES, RunFiles, SavedRow, read_rows, require_rows
from lockstep.report.turns import Turn, answered, speaker, turn_parts
from lockstep.text import AnswerPart

MAX_POINTS: Final = 1000
"""Points of a curve; a longer one keeps the lowest and the highest of each of half as many stretches, and where one has
values that are not finite, the first of them."""
JOB_SIZE: Final = ("job/processes", "job/slices")  # figures of the job at the first step after each start
NOT_CURVES: Final = ("step", "time")
OWN_STEP: Final = "/step"  # the end of the names of values that say their own step, for a tracker's axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """The values of one metric."""

    steps: Sequence[int]
    values: Sequence[float]
    points: int  # number of points before the curve was thinned


def read_series(paths: Iterable[Path]) -> dict[str, Series]:
    """Read the metrics of a run from files that may still be written.

    Returns:
        The curves by the metric's name, in order of first appearance. At a step that has several values, as where a
        run went on from an earlier checkpoint, the last counts. Texts are not curves.

    Raises:
        LockstepError: A line cannot be read or has no step; the message has file and line.
    """
    series: dict[str, dict[int, float]] = {}
    for path in paths:
        records, _ = numbered_records(path)
        for number, record in records:
            step = record.get("step")
            if isinstance(step, bool) or not isinstance(step, int):
                raise LockstepError(
                    f"{path}:{number}: the column 'step' is {step!r}; a whole number was expected, as in the metrics "
                    "of a run. Mend or remove the line, or name the file of rows alone in another directory."
                )
            for name, value in record.items():
                if name not in NOT_CURVES and not name.endswith(OWN_STEP) and (number_ := as_float(value)) is not None:
                    series.setdefault(name, {})[step] = number_
    curves = {}
    for name, values in series.items():
        steps = sorted(values)
        kept = steps if len(steps) <= MAX_POINTS else _thinned(steps, [values[step] for step in steps])
        curves[name] = Series(steps=kept, values=[values[step] for step in kept], points=len(steps))
    return curves


def _thinned(steps: Sequence[int], values: Sequence[float]) -> list[int]:
    """The steps that are kept of a curve that is too long, among them the first and the last."""
    kept = {steps[0], steps[-1]}
    stretches = MAX_POINTS // 2 - 1
    for stretch in range(stretches):
        places = range(stretch * len(steps) // stretches, (stretch + 1) * len(steps) // stretches)
        finite = [place for place in places if math.isfinite(values[place])]
        if finite:
            kept |= {steps[min(finite, key=values.__getitem__)], steps[max(finite, key=values.__getitem__)]}
        if len(finite) < len(places):
            kept.add(next(steps[place] for place in places if not math.isfinite(values[place])))
    return sorted(kept)


FORMAT = 1  # the number of this layout, which the page's script expects
_DIGITS = 6  # significant digits of the numbers in the page


def make_payload(runs: Sequence[RunFiles], *, reload_s: float | None = None) -> dict[str, Any]:
    """Read one run, or two to be shown side by side.

    Args:
        reload_s: The seconds after which the page loads itself again; None for a page that stays as it is.

    Returns:
        The object that the page's script reads, without anything that JSON cannot express.

    Raises:
        ConfigError: A run has no rows.
        LockstepError: A row or a metric cannot be read, or the runs do not go together.
    """
    for run in runs:
        require_rows(run)
    rows = [[row for path in (*run.rows, *run.rollouts) for row in read_rows(path)] for run in runs]
    for run, run_rows in zip(runs, rows, strict=True):
        if not run_rows:
            paths = ", ".join(map(str, (*run.rows, *run.rollouts)))
            raise LockstepError(f"{paths} has no rows yet. Wait for the run's first round of samples.")
    axes = {row.axis: run.name for run, run_rows in zip(runs, rows, strict=True) for row in run_rows}
    if len(axes) > 1:
        raise LockstepError(
            f"rows with a step ({axes['step']}) and rows with a round ({axes['round']}) cannot be shown together. "
            "Make a report of each."
        )
    prompts = _Prompts()
    notes: list[str] = []
    shown = [_run(run, run_rows, prompts, notes) for run, run_rows in zip(runs, rows, strict=True)]
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
    numbers are several prompts, and so are several texts that had the same number one after the other. A question of
    rollouts is another prompt than one of samples.
    """

    def __init__(self) -> None:
        self.table: list[dict[str, Any]] = []
        """Each prompt's ``key`` in the address, its ``id`` as the run has it, its ``text``, and whether its answers are
        those of a rollout."""
        self._keys: set[str] = set()

    def places(self, rows: Iterable[SavedRow]) -> list[int]:
        """The place in the table of each row's prompt."""
        places_of_text: dict[tuple[bool, str], list[int]] = {}
        for place, prompt in enumerate(self.table):
            places_of_text.setdefault((prompt["rollout"], prompt["text"]), []).append(place)
        own: dict[tuple[bool, int | str, str], int] = {}
        places = []
        for row in rows:
            identity = (row.rollout, row.prompt_id, row.prompt)
            if identity not in own:
                same = places_of_text.get((row.rollout, row.prompt))
                own[identity] = same.pop(0) if same else self._add(row)
            places.append(own[identity])
        return places

    def _add(self, row: SavedRow) -> int:
        key, number = str(row.prompt_id), 1
        while key in self._keys:
            number += 1
            key = f"{row.prompt_id}.{number}"
        self._keys.add(key)
        self.table.append({"key": key, "id": row.prompt_id, "text": row.prompt, "rollout": row.rollout})
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
    texts, reasons, health = _Texts(), _Texts(), _Texts()
    strips, alarms = read_strips(shown, run.health)
    series, traces = read_series(run.metrics), run.traces()
    changes = _changes(*(series.pop(name, None) for name in JOB_SIZE))
    notes += [f"{run.name}: from step {step} on {text}." for step, text, _ in changes]
    for name, curve in series.items():
        if curve.points > len(curve.steps):
            notes.append(f"{run.name}: the curve {name} shows {len(curve.steps):,} of its {curve.points:,} points.")
    for first, end, processes in traces:
        notes.append(
            f"{run.name}: steps {first} to {end} were traced on process{'es' * (len(processes) > 1)} "
            f"{', '.join(map(str, processes))}: tensorboard --logdir {run.directory / 'profiler'}"
        )
    return {
        "name": run.name,
        "traces": [[first, end, f"{TRACES}/steps-{first}-{end}"] for first, end, _ in traces],
        "changes": changes,
        "files": [path.name for path in (*run.rows, *run.rollouts, *run.metrics, *run.health)],
        "when": [row.when for row in shown],
        "prompt": [places[number] for number in kept],
        "generation": [row.generation_id for row in shown],
        "text": [texts.place(row.shown) for row in shown],
        "texts": texts.table,
        "reason": [reasons.place(row.finish_reason) for row in shown],
        "reasons": reasons.table,
        "health": [None if row.health is None else health.place(row.health) for row in shown],
        "healths": health.table,
        "strips": {name: dataclasses.asdict(strip) for name, strip in strips.items()},
        "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
        "numbers": {name: [_plain(row.numbers.get(name)) for row in shown] for name in _names(shown, "numbers")},
        "words": {name: [row.texts.get(name) for row in shown] for name in _names(shown, "texts")},
        "tokens": {
            str(number): {"texts": [text for text, _ in row.tokens], "logprobs": [_plain(p) for _, p in row.tokens]}
            for number, row in enumerate(shown)
            if row.tokens
        },
        "turns": {str(number): _turns(row) for number, row in enumerate(shown) if row.turns},
        "series": {
            name: {"steps": list(curve.steps), "values": [_plain(value) for value in curve.values]}
            for name, curve in series.items()
        },
    }


def _turns(row: SavedRow) -> list[dict[str, Any]]:
    """The turns of a conversation, without those that are the prompt, which the page shows above."""
    rest = answered(row.turns)
    opening = "\n".join(f"{turn['role']}: {turn.get('content')}" for turn in row.turns[: len(row.turns) - len(rest)])
    return list(map(_turn, rest if opening == row.prompt else row.turns))


def _turn(turn: Turn) -> dict[str, Any]:
    """A turn as the page draws it: who speaks, what was said in parts, and the reward that followed."""
    parts = [_part(part) for part in turn_parts(turn)]
    reward = {"reward": _plain(float(turn["reward"]))} if turn.get("reward") is not None else {}
    return {"role": turn["role"], "speaker": speaker(turn), "parts": parts, **reward}


def _part(part: AnswerPart) -> dict[str, Any]:
    """A part of an answer; that of a call has it in one line, or why it cannot be read."""
    call = {"call": part.error or str(part.call), "readable": not part.error} if part.kind == "call" else {}
    return {"kind": part.kind, "text": part.text, **call}


def _changes(processes: Series | None, slices: Series | None) -> list[tuple[int, str, int]]:
    """The steps from which on a run had more or fewer processes or slices than before; in words; the processes."""
    if processes is None or slices is None:
        return []
    several = max(slices.values) > 1

    def size(count: float, of: float) -> str:
        text = f"{count:.0f} process{'es' * (count != 1)}"
        return f"{text} in {of:.0f} slice{'s' * (of != 1)}" if several else text

    starts = list(zip(processes.steps, processes.values, slices.values, strict=True))
    return [
        (step, f"{size(*now)}, before {size(*before)}", round(now[0]))
        for (_, *before), (step, *now) in itertools.pairwise(starts)
        if now != before
    ]


def _names(rows: Iterable[SavedRow], kind: str) -> list[str]:
    """The names of the columns of a kind: the reward, other metrics, what every row has."""
    names = dict.fromkeys(name for row in rows for name in getattr(row, kind))
    return sorted(names, key=lambda name: (name in ("num_tokens", "mean_logprob"), name != "reward"))


def _plain(value: float | None) -> float | int | str | None:
    """A number as short as it is useful, whole ones without a point; one that JSON cannot express by its name."""
    if value is None:
        return None
    if not math.isfinite(value):
        return named_float(value)
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


SCRIPTS: Final = (
    "model.js",
    "text.js",
    "diff.js",
    "virtual_list.js",
    "chart.js",
    "state.js",
    "list.js",
    "turns.js",
    "detail.js",
    "curves.js",
    "health.js",
    "print.js",
    "page.js",
)
"""The parts of the page's one script, in order."""
_NOT_IN_HTML: Final = re.compile(
    "[<>&\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff]"
)
"""Characters that could end the data block or mislead who reads the file's source: written as escapes."""


def render_page(payload: Mapping[str, Any], title: str) -> str:
    """Make the page."""
    # Whoever imports lockstep.report to train does not wait for a template engine.
    import jinja2
    from markupsafe import Markup

    folder = resources.files(__package__) / "html"
    style = (folder / "page.css").read_text(encoding="utf-8")
    parts = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}\n}})();\n'
    assert "</" not in style and "</script" not in script.lower() and "<!--" not in script
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=title.encode(errors="backslashreplace").decode(),  # without surrogates
        version=importlib.metadata.version("jax-lockstep"),
        style=Markup(style),
        style_hash=_hash(style),
        script=Markup(script),
        script_hash=_hash(script),
        data=Markup(escape_json(payload)),
    )


def escape_json(value: Any) -> str:
    """JSON that can stand in an HTML ``script`` element, whatever texts are in it.

    The characters ``<``, ``>`` and ``&``, line separators, bidirectional controls, lone surrogates and what is not a
    character are written as JSON's escapes of four digits (https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements).
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _NOT_IN_HTML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_page(page: str, path: Path) -> int:
    """Write the page beside its place and move it there, so that nobody reads half of it; return the bytes written."""
    content = page.encode()
    write_file(path, content)
    return len(content)


def _hash(text: str) -> str:
    """The source expression of a policy that allows exactly this text (https://www.w3.org/TR/CSP3/#match-element-to-source-list)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
