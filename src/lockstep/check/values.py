"""Values that should be equal on two processes, compared: arguments of launches, and pieces of arrays."""

import collections
import dataclasses
from collections.abc import Iterator

from lockstep.check.differences import hints
from lockstep.check.findings import Finding, Place
from lockstep.check.log import Launch, ProcessLog, Put
from lockstep.check.stack import own_line

MOST_AHEAD = 10_000
"""Arrays that one process may put at a line before the other does; with more, the line is not compared."""


def compare_arguments(first: ProcessLog, other: ProcessLog, one: Launch, another: Launch) -> Iterator[Finding]:
    """Arguments of which each process has its own copy, and that differ.

    Args:
        first: One process.
        other: Another one.
        one: A launch of the first.
        another: The launch of the other that belongs to it.
    """
    for (position, digest, short), (_, other_digest, other_short) in zip(one.values, another.values, strict=False):
        if digest != other_digest:
            name = one.program.name
            yield Finding(
                kind="values",
                text=f"argument {position} of {name}, of which each process passes its own copy, differs",
                places=(
                    Place(process=first.index, text=f"passes {short}", stack=one.stack),
                    Place(process=other.index, text=f"passes {other_short}", stack=another.stack),
                ),
                details=hints(one),
            )


class PutComparison:
    """Compares the arrays that two processes put together, by the line that does it.

    Where one of them puts more at a line than the other, it is not known which belong together: what differs
    is said when both have put as many.

    Args:
        first: One process.
        other: Another one.
    """

    def __init__(self, first: ProcessLog, other: ProcessLog) -> None:
        self._logs = (first, other)
        self._lines: dict[tuple[str, str], _PutsAtLine] = collections.defaultdict(_PutsAtLine)

    def add(self, side: int, put: Put) -> Iterator[Finding]:
        """Take in the next array.

        Args:
            side: 0 where the first process puts it, 1 where the other does.
            put: The array.
        """
        own = own_line(put.stack)
        line = self._lines[put.array, own.place if own else ""]
        if line.given_up:
            return
        line.waiting[side].append(put)
        if all(line.waiting):
            finding = self._compare(*(each.popleft() for each in line.waiting))
            if finding is not None:
                kept = line.kept
                line.kept = finding if kept is None else dataclasses.replace(kept, count=kept.count + 1)
        if line.kept is not None and not any(line.waiting):
            yield line.kept
            line.kept = None
        line.given_up = max(map(len, line.waiting)) > MOST_AHEAD
        if line.given_up:
            line.waiting, line.kept = (collections.deque(), collections.deque()), None

    def _compare(self, put: Put, twin: Put) -> Finding | None:
        differ = [at for at in put.pieces.keys() & twin.pieces.keys() if put.pieces[at] != twin.pieces[at]]
        if not differ:
            return None
        first, other = self._logs
        return Finding(
            kind="values",
            text=f"an array {put.array} is put together from pieces that should be copies and differ",
            places=(
                Place(process=first.index, text="puts its copy", stack=put.stack),
                Place(process=other.index, text="puts another", stack=twin.stack),
            ),
            details=(f"{len(differ)} of its pieces are on both processes and differ: {min(differ)}",),
        )


class _PutsAtLine:
    """The arrays that two processes put at one line.

    Attributes:
        waiting: What each process has put and the other has not.
        kept: What differs, until both have put as many.
        given_up: Whether one is so far ahead that they cannot belong together.
    """

    def __init__(self) -> None:
        self.waiting: tuple[collections.deque[Put], collections.deque[Put]] = (collections.deque(), collections.deque())
        self.kept: Finding | None = None
        self.given_up = False
