"""The launches of two processes, aligned while they go on: the fewest that one has and the other has not."""

import copy
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from lockstep.check.differences import alone, compare_arguments, different, order
from lockstep.check.findings import Finding
from lockstep.check.log import Launch, ProcessLog

MOST = 2000  # differences after which the rest of two sequences counts as different


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """A stretch in which two sequences differ; what stands between two of them is equal."""

    left: tuple[int, int]  # the stretch of the first one, as begin and end
    right: tuple[int, int]  # that of the second one


def gaps(left: Sequence[Hashable], right: Sequence[Hashable], most: int = MOST, *, open_end: bool = False) -> list[Gap]:
    """The stretches in which two sequences differ, as short as can be (Myers 1986, An O(ND) Difference Algorithm).

    Args:
        most: The number of differences after which the rest counts as one.
        open_end: Whether more may follow: what one has left at the end of the other is then the last gap.
    """
    begin = 0
    while begin < min(len(left), len(right)) and left[begin] == right[begin]:
        begin += 1
    equal = [(i + begin, j + begin) for i, j in _common(left[begin:], right[begin:], most, open_end)]
    stretches = []
    i = j = begin
    for x, y in [*equal, (len(left), len(right))]:
        if x > i or y > j:
            stretches.append(Gap(left=(i, x), right=(j, y)))
        i, j = x + 1, y + 1
    return stretches


def _common(left: Sequence[Hashable], right: Sequence[Hashable], most: int, open_end: bool) -> list[tuple[int, int]]:
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


NEAR = 50
"""Launches within which one that is missing and one too many are the same, in another order; so many must have
followed before a difference is decided."""
NAMELESS = "<lambda>"  # in the names of programs that have none


class End(enum.Enum):
    """The end of a run."""

    DONE = enum.auto()
    FAILED = enum.auto()  # a process failed, and the others were ended
    HUNG = enum.auto()  # processes waited for each other
    GOES_ON = enum.auto()  # it did not end yet


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unmatched:
    """A launch that the other process does not make."""

    launch: Launch
    index: int  # its number among the launches of its process
    at: int  # number of the launch that the other process makes in its place
    following: Launch | None  # that launch; None: no more came


class LaunchComparison:
    """Compare the launches of two processes, from one thread of each, whose order can be compared.

    Equal launches are dropped as soon as both are there. Where two differ, it waits for as many launches as it takes to
    say what is missing, what is too many and what only comes in another order.
    """

    def __init__(self, first: ProcessLog, second: ProcessLog) -> None:
        self._logs = (first, second)
        self._waiting: tuple[list[Launch], list[Launch]] = ([], [])
        self._done = (0, 0)
        self._only: tuple[list[_Unmatched], list[_Unmatched]] = ([], [])
        self._window = 2 * NEAR

    @property
    def ahead(self) -> tuple[int, int]:
        """The number of launches of each process that wait for their counterpart."""
        left, right = self._waiting
        return len(left), len(right)

    @property
    def differs(self) -> bool:
        """Whether there is a difference that is not decided yet."""
        return all(self._waiting) or any(self._only)

    def add(self, left: Sequence[Launch], right: Sequence[Launch]) -> Iterator[Finding]:
        """Take in the next launches, and say what is different for sure."""
        self._waiting[0].extend(left)
        self._waiting[1].extend(right)
        while True:
            yield from self._pass_equal()
            shorter = min(self.ahead)
            if shorter < self._window:
                return
            cut = self._cut()
            if cut is None and 2 * self._window <= MOST:
                self._window *= 2
                continue
            yield from self._decide(*(cut or (self._window, self._window)))
            self._window = 2 * NEAR

    def rest(self, end: End) -> Iterator[Finding]:
        """The differences that are not decided yet, if nothing more comes."""
        twin = copy.copy(self)
        twin._waiting = (list(self._waiting[0]), list(self._waiting[1]))
        twin._only = (list(self._only[0]), list(self._only[1]))
        yield from twin._decide(*twin.ahead, end)

    def _pass_equal(self) -> Iterator[Finding]:
        """Drop what is equal at the front of both."""
        left, right = self._waiting
        equal = 0
        for launch, twin in zip(left, right, strict=False):
            if launch.token != twin.token:
                break
            equal += 1
            if launch.values:
                yield from compare_arguments(*self._logs, launch, twin)
        yield from self._drop(equal, equal)

    def _cut(self) -> tuple[int, int] | None:
        """The numbers after the last two launches that belong together and that enough others follow."""
        left, right = (waiting[: self._window] for waiting in self._waiting)
        ends_of_pair = None
        i = j = 0
        stretches = gaps([launch.token for launch in left], [launch.token for launch in right], open_end=True)
        ends = Gap(left=(len(left),) * 2, right=(len(right),) * 2)
        for gap in [*stretches, ends]:
            equal = min(gap.left[0] - i, len(left) - NEAR - i, len(right) - NEAR - j)
            if equal > 0:
                ends_of_pair = (i + equal, j + equal)
            i, j = gap.left[1], gap.right[1]
        return ends_of_pair

    def _decide(self, x: int, y: int, end: End | None = None) -> Iterator[Finding]:
        """Say what is different in the first ``x`` and ``y`` launches that wait."""
        first, second = self._logs
        left, right = self._waiting[0][:x], self._waiting[1][:y]
        pairs: list[tuple[Launch, Launch]] = []
        i = j = 0
        open_end = end is End.GOES_ON
        for gap in gaps([launch.token for launch in left], [launch.token for launch in right], open_end=open_end):
            pairs += zip(left[i : gap.left[0]], right[j : gap.right[0]], strict=True)
            i, j = gap.left[1], gap.right[1]
            a, b = list(range(*gap.left)), list(range(*gap.right))
            for same in (_equal, _differ):
                matched = _matched({n: left[n] for n in a}, {n: right[n] for n in b}, same)
                a = [n for n in a if n not in dict(matched)]
                b = [n for n in b if n not in dict(matched).values()]
                same_launches = [(left[n], right[m]) for n, m in matched]
                if same is _equal:
                    pairs += same_launches
                    continue
                for launch, twin in same_launches:
                    # On its own devices a process may run a program of its own: JAX cuts its part out of a batch so.
                    if launch.program.shared or twin.program.shared:
                        yield different(first, launch, second, twin)
            for only, numbers, launches, at in ((0, a, left, gap.right[0]), (1, b, right, gap.left[0])):
                waiting_launches = self._waiting[1 - only]
                self._only[only].extend(
                    _Unmatched(
                        launch=launches[number],
                        index=self._done[only] + number,
                        at=self._done[1 - only] + at,
                        following=waiting_launches[at] if at < len(waiting_launches) else None,
                    )
                    for number in numbers
                )
        pairs += zip(left[i:], right[j:], strict=True)
        for launch, twin in pairs:
            yield from compare_arguments(first, second, launch, twin)
        yield from self._drop(x, y, end)

    def _drop(self, x: int, y: int, end: End | None = None) -> Iterator[Finding]:
        """Leave launches behind, and say of those that one process alone makes what can be said now."""
        del self._waiting[0][:x], self._waiting[1][:y]
        self._done = (self._done[0] + x, self._done[1] + y)
        if not any(self._only):
            return
        first, second = self._logs
        for unmatched in list(self._only[0]):
            near = (candidate for candidate in self._only[1] if abs(candidate.index - unmatched.at) <= NEAR)
            moved = next((candidate for candidate in near if candidate.launch.token == unmatched.launch.token), None)
            if moved is not None:
                self._only[0].remove(unmatched)
                self._only[1].remove(moved)
                yield order(first, unmatched.launch, second, moved.launch)
        decided = self._done[1] - NEAR
        for only, log, absent_log in ((0, first, second), (1, second, first)):
            for unmatched in list(self._only[only]):
                if end is None and (unmatched.index if only else unmatched.at) >= decided:
                    continue
                self._only[only].remove(unmatched)
                after = unmatched.following is None
                if after and end in (End.FAILED, End.GOES_ON):
                    break  # that it launches no more says nothing about a process that was ended, or goes on
                waits = after and end is End.HUNG and unmatched.launch.program.shared
                if waits and absent_log.waits_for_devices:
                    break  # in a launch that both have made: it is not this one that is missing
                yield alone(log, unmatched.launch, absent_log, unmatched.following, waits)
                if waits:
                    break  # what else it has handed to its devices waits behind that


def _equal(launch: Launch, twin: Launch) -> bool:
    """The same program: from another line, as in the two branches of an if, or where the end of a run is not known."""
    return launch.program.key == twin.program.key


def _differ(launch: Launch, twin: Launch) -> bool:
    """The same name at the same line, or a name that says something: one program that differs, and not two."""
    if launch.program.name != twin.program.name or launch.program.key == twin.program.key:
        return False
    return launch.place == twin.place or NAMELESS not in launch.program.name


def _matched(
    left: Mapping[int, Launch], right: Mapping[int, Launch], same: Callable[[Launch, Launch], bool]
) -> list[tuple[int, int]]:
    """Pairs of the two by their numbers, in the order of both."""
    pairs: list[tuple[int, int]] = []
    rest = dict(right)
    for x, launch in left.items():
        y = next((y for y, twin in rest.items() if same(launch, twin)), None)
        if y is not None:
            pairs.append((x, y))
            rest = {number: launch for number, launch in rest.items() if number > y}
    return pairs
