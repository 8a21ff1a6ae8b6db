"""Curves of a run's metrics, thinned to what a screen can show."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.report.jsonl import numbered_records

MAX_POINTS: Final = 1000
"""Points of a curve; a longer one keeps the lowest and the highest of each of half as many stretches, and where one has
values that are not finite, the first of them."""
NOT_CURVES: Final = ("step", "time")
_NAMED_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """The values of one metric.

    Args:
        steps: The steps, rising.
        values: The value at each step.
        points: The number of points before the curve was thinned.
    """

    steps: Sequence[int]
    values: Sequence[float]
    points: int


def read_series(paths: Iterable[Path]) -> dict[str, Series]:
    """Read the metrics of a run from files that may still be written.

    Args:
        paths: Files of JSON lines with a ``step`` and numbers.

    Returns:
        The curves by the metric's name, in order of first appearance. At a step that has several values, as where a
        run went on from an earlier checkpoint, the last counts. Texts are not curves.

    Raises:
        LockstepError: A line cannot be read or has no step; the message has file and line.
        OSError: A file cannot be read.
    """
    found: dict[str, dict[int, float]] = {}
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
                if name not in NOT_CURVES and (number_ := _number(value)) is not None:
                    found.setdefault(name, {})[step] = number_
    return {name: _series(values) for name, values in found.items()}


def _series(values: dict[int, float]) -> Series:
    steps = sorted(values)
    kept = steps if len(steps) <= MAX_POINTS else _thinned(steps, [values[step] for step in steps])
    return Series(steps=kept, values=[values[step] for step in kept], points=len(steps))


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


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _NAMED_FLOATS.get(value)
    if isinstance(value, int | float):
        return float(value)
    return None
