"""The differences of two sequences of launches: the fewest that one has and the other has not."""

import dataclasses
from collections.abc import Hashable, Sequence

MOST = 2000
"""Differences after which the rest of two sequences counts as different."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """A stretch in which two sequences differ; what stands between two of them is equal.

    Args:
        left: The stretch of the first one, as begin and end.
        right: That of the second one.
    """

    left: tuple[int, int]
    right: tuple[int, int]


def gaps(left: Sequence[Hashable], right: Sequence[Hashable], most: int = MOST, *, open_end: bool = False) -> list[Gap]:
    """The stretches in which two sequences differ, as short as can be (Myers 1986, An O(ND) Difference Algorithm).

    Args:
        left: The launches of one process, by what must be equal.
        right: Those of another.
        most: The number of differences after which the rest counts as one.
        open_end: Whether more may follow: what one has left at the end of the other is then the last gap.
    """
    begin = 0
    while begin < min(len(left), len(right)) and left[begin] == right[begin]:
        begin += 1
    equal = [(i + begin, j + begin) for i, j in _equal(left[begin:], right[begin:], most, open_end)]
    found = []
    i = j = begin
    for x, y in [*equal, (len(left), len(right))]:
        if x > i or y > j:
            found.append(Gap(left=(i, x), right=(j, y)))
        i, j = x + 1, y + 1
    return found


def _equal(left: Sequence[Hashable], right: Sequence[Hashable], most: int, open_end: bool) -> list[tuple[int, int]]:
    """The pairs of a longest common subsequence, or of as much of one as ``most`` differences reach."""
    if not left or not right:
        return []
    reached = {1: 0}  # by diagonal i - j: the farthest i after some number of differences
    history = []
    for differences in range(min(most, len(left) + len(right)) + 1):
        history.append(reached.copy())
        for diagonal in range(-differences, differences + 1, 2):
            down = diagonal == -differences or (
                diagonal != differences and reached[diagonal - 1] < reached[diagonal + 1]
            )
            i = reached[diagonal + 1] if down else reached[diagonal - 1] + 1
            j = i - diagonal
            while i < len(left) and j < len(right) and left[i] == right[j]:
                i, j = i + 1, j + 1
            reached[diagonal] = i
            ends = (i >= len(left), j >= len(right))
            if all(ends) or (open_end and any(ends)):
                return _walk_back(history, i, j)
    diagonal, i = max(reached.items(), key=lambda item: 2 * item[1] - item[0] if item[1] <= len(left) else -1)
    return _walk_back(history, i, i - diagonal)


def _walk_back(history: list[dict[int, int]], i: int, j: int) -> list[tuple[int, int]]:
    pairs = []
    for differences in range(len(history) - 1, -1, -1):
        reached, diagonal = history[differences], i - j
        down = diagonal == -differences or (
            diagonal != differences and reached.get(diagonal - 1, -1) < reached.get(diagonal + 1, -1)
        )
        before = diagonal + 1 if down else diagonal - 1
        x = reached[before]
        y = x - before
        start = (x, y + 1) if down else (x + 1, y)  # where the run of equal ones after this difference began
        if differences == 0:
            start = (0, 0)
        while (i, j) > start:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        i, j = x, y
    return pairs[::-1]
