"""Where two sequences of launches part, and where they meet again."""

import dataclasses
from collections.abc import Hashable, Sequence

FARTHEST = 400
"""Launches that are looked through for the place where two processes meet again."""
AGREE = 3
"""Launches in a row that must be equal there, or all that are left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """A stretch in which two sequences differ.

    Args:
        left: The stretch of the first one, as begin and end.
        right: That of the second one.
    """

    left: tuple[int, int]
    right: tuple[int, int]


def gaps(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[Gap]:
    """Where two sequences differ, with as little left out as can be.

    Args:
        left: The launches of one process, by what must be equal.
        right: Those of another.
    """
    found = []
    i = j = 0
    while i < len(left) or j < len(right):
        if i < len(left) and j < len(right) and left[i] == right[j]:
            i, j = i + 1, j + 1
            continue
        a, b = _meet(left[i : i + FARTHEST + AGREE], right[j : j + FARTHEST + AGREE])
        found.append(Gap(left=(i, i + a), right=(j, j + b)))
        i, j = i + a, j + b
    return found


def _meet(left: Sequence[Hashable], right: Sequence[Hashable]) -> tuple[int, int]:
    """How much to leave out on either side so that both go on with the same."""
    for total in range(1, len(left) + len(right) + 1):
        for a in range(max(0, total - len(right)), min(total, len(left)) + 1):
            b = total - a
            ahead = min(AGREE, max(len(left) - a, len(right) - b))
            if left[a : a + ahead] == right[b : b + ahead]:
                return a, b
    return len(left), len(right)
