"""Runs: stretches of a sequence in which a period comes several times in a row, found exactly."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

COPIES = 3
"""Whole copies of its period that a run has at least: a paragraph that is quoted once is none."""
_FEW = 16  # windows that are left to be compared whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A maximal stretch of a sequence in which each token is the one ``period`` tokens before it: a repetition that
    goes on in neither direction (Kolpakov and Kucherov 1999, https://doi.org/10.1109/SFFCS.1999.814634).

    Args:
        begin: The index of its first token.
        end: One more than the index of its last token.
        period: Its smallest period, in tokens.
    """

    begin: int
    end: int
    period: int

    @property
    def length(self) -> int:
        """Its number of tokens."""
        return self.end - self.begin


def runs(tokens: Sequence[int], least: int) -> list[Run]:
    """All runs of `COPIES` or more copies, each once, the shortest periods first.

    In a run of period p at least ``max((COPIES - 1) * p, least - p)`` tokens in a row are equal to those p before them,
    and one of the windows of half that size, put end to end, is among these: only such windows are compared, some five
    per token however long a period may be.

    Args:
        tokens: Integers, such as token ids.
        least: The number of tokens that a run has at least, from 2.
    """
    sequence = np.asarray(tokens, np.int64)
    begins, widths, periods = _equal_at_places(sequence, *_windows(len(sequence), least))
    found_runs: list[Run] = []
    while len(begins):
        run = _run_around(sequence, int(begins[0]), int(widths[0]), int(periods[0]))
        known = np.arange(len(begins)) == 0
        if run is not None:
            # Windows of a multiple of the period in the run are in no other one (Fine and Wilf 1965).
            known |= (periods % run.period == 0) & (begins - periods >= run.begin) & (begins + widths <= run.end)
            if run.length >= max(least, COPIES * run.period):
                found_runs.append(run)
        begins, widths, periods = begins[~known], widths[~known], periods[~known]
    return found_runs


type _Windows = tuple[Int[np.ndarray, " window"], Int[np.ndarray, " window"], Int[np.ndarray, " window"]]
"""First index, number of tokens and period of each window: its tokens are compared with those a period before."""


def _windows(size: int, least: int) -> _Windows:
    """The windows of a sequence."""
    ends, begins, widths, periods = _window_table(max(64, 1 << (size - 1).bit_length()) if size else 64, least)
    count = int(np.searchsorted(ends, size, side="right"))
    return begins[:count], widths[:count], periods[:count]


@functools.lru_cache(maxsize=8)
def _window_table(size: int, least: int) -> tuple[Int[np.ndarray, " window"], ...]:
    """Ends, first indices, widths and periods of the windows of the longest sequence, in the order of their ends."""
    begins, widths, periods = [], [], []
    for period in range(1, size // COPIES + 1):
        width = (max((COPIES - 1) * period, least - period) + 1) // 2
        own = np.arange(-(-period // width) * width, size - width + 1, width)
        begins.append(own)
        widths.append(np.full_like(own, width))
        periods.append(np.full_like(own, period))
    columns = [np.concatenate(column) for column in (begins, widths, periods)]
    ends = columns[0] + columns[1]
    order = np.argsort(ends, kind="stable")
    return tuple(column[order] for column in (ends, *columns))


def _equal_at_places(
    sequence: Int[np.ndarray, " token"],
    begins: Int[np.ndarray, " window"],
    widths: Int[np.ndarray, " window"],
    periods: Int[np.ndarray, " window"],
) -> _Windows:
    """The windows that are equal to what is a period before them at a few places, by period."""
    for part in (0, 4, 2, 1, 3):  # quarters of the window: one place for all windows in a call
        if len(begins) <= _FEW:
            break
        places = begins + (widths - 1) * part // 4
        equal = sequence[places] == sequence[places - periods]
        begins, widths, periods = begins[equal], widths[equal], periods[equal]
    order = np.argsort(periods, kind="stable")
    return begins[order], widths[order], periods[order]


def _run_around(sequence: Int[np.ndarray, " token"], begin: int, width: int, period: int) -> Run | None:
    """The maximal stretch with a period around a window; None where the window does not have it."""
    equal = sequence[period:] == sequence[:-period]  # at i: whether token i + period is token i
    first, last = begin - period, begin - period + width
    if not equal[first:last].all():
        return None
    before, after = equal[:first][::-1], equal[last:]
    first -= len(before) if before.all() else int(before.argmin())
    last += len(after) if after.all() else int(after.argmin())
    return Run(begin=first, end=last + period, period=period)
