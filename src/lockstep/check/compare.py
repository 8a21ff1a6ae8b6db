"""Findings from what two processes do differently: launches, programs, values."""

import collections
import difflib
import enum
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep.check.align import gaps
from lockstep.check.findings import Finding, Place
from lockstep.check.log import Launch, ProcessLog, Put
from lockstep.check.stack import own_line, shown

NEAR = 50
"""Launches within which one that is missing and one too many are the same, in another order."""
SHOWN_LINES = 6
"""Lines of two programs that are shown where they differ."""
HINTS = {
    r"\bset\(|frozenset\(|\bin \{": "the order of a set of strings differs between processes",
    r"listdir|iterdir|glob\(|scandir": "the order of a directory listing differs between machines",
    r"\btime\.|perf_counter|datetime|monotonic\(": "clocks differ between processes",
    r"\brandom\.|default_rng\(\)|\bhash\(|uuid|getpid|gethostname": "it differs between processes",
}
"""What in a line near a launch can make it differ, and why."""
HINT_LINES = 8
"""Lines above a launch that are looked through for that."""

NAMELESS = "<lambda>"
"""In the names of programs that have none."""

Pair = tuple[Launch, Launch]


class End(enum.Enum):
    """How a run ended."""

    DONE = enum.auto()
    FAILED = enum.auto()
    """A process failed, and the others were ended."""
    HUNG = enum.auto()
    """Processes waited for each other."""


def compare_launches(first: ProcessLog, other: ProcessLog, end: End) -> tuple[list[Finding], list[Pair]]:
    """What two processes launch differently, and the launches that belong together.

    Launches from other threads than the one that trains have no order to be compared.

    Args:
        first: One process.
        other: Another one.
        end: How the run ended.
    """
    left, right = first.ordered, other.ordered
    pairs: list[Pair] = []
    left_only: list[tuple[int, int]] = []
    right_only: list[tuple[int, int]] = []
    findings: list[Finding] = []
    i = j = 0
    for gap in gaps([_token(each) for each in left], [_token(each) for each in right]):
        pairs += zip(left[i : gap.left[0]], right[j : gap.right[0]], strict=True)
        i, j = gap.left[1], gap.right[1]
        a, b = list(range(*gap.left)), list(range(*gap.right))
        for same in (_equal_elsewhere, _differ):
            matched = _matched({x: left[x] for x in a}, {y: right[y] for y in b}, same)
            a = [x for x in a if x not in dict(matched)]
            b = [y for y in b if y not in dict(matched).values()]
            both = [(left[x], right[y]) for x, y in matched]
            if same is _differ:
                # On its own devices a process may run a program of its own: JAX cuts its part out of a batch so.
                findings += [_different(first, x, other, y) for x, y in both if x.program.shared or y.program.shared]
            else:
                pairs += both
        left_only += [(x, gap.right[0]) for x in a]
        right_only += [(y, gap.left[0]) for y in b]
    pairs += zip(left[i:], right[j:], strict=True)
    for x, at in list(left_only):
        moved = [y for y, _ in right_only if _token(right[y]) == _token(left[x]) and abs(y - at) <= NEAR]
        if moved:
            left_only.remove((x, at))
            right_only = [each for each in right_only if each[0] != moved[0]]
            findings.append(_order(first, left[x], other, right[moved[0]]))
    for one, launches, another, others, only in (
        (first, left, other, right, left_only),
        (other, right, first, left, right_only),
    ):
        for index, at in only:
            after = at >= len(others)
            if after and end is End.FAILED:
                break  # that it launches no more says nothing about a process that was ended
            waits = after and end is End.HUNG and launches[index].program.shared
            findings.append(_alone(one, launches[index], another, others[at : at + 1], waits))
            if waits:
                break  # what else it has handed to its devices waits behind that
    return findings, pairs


def compare_values(first: ProcessLog, other: ProcessLog, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Values that should be equal on two processes and differ: arguments of launches, and pieces of arrays.

    Args:
        first: One process.
        other: Another one.
        pairs: The launches of the two that belong together.
    """
    for one, another in pairs:
        for (position, digest, short), (_, other_digest, other_short) in zip(one.values, another.values, strict=False):
            if digest != other_digest:
                name = one.program.name
                text = f"argument {position} of {name}, of which each process passes its own copy, differs"
                yield Finding(
                    kind="values",
                    text=text,
                    places=(
                        Place(process=first.index, text=f"passes {short}", stack=one.stack),
                        Place(process=other.index, text=f"passes {other_short}", stack=another.stack),
                    ),
                    details=hints(one),
                )
    mine, theirs = _by_line(first.puts), _by_line(other.puts)
    for key in mine.keys() & theirs.keys():
        if len(mine[key]) != len(theirs[key]):
            continue  # which belong together is not known
        for put, twin in zip(mine[key], theirs[key], strict=True):
            differ = [at for at in put.pieces.keys() & twin.pieces.keys() if put.pieces[at] != twin.pieces[at]]
            if differ:
                yield Finding(
                    kind="values",
                    text=f"an array {put.array} is put together from pieces that should be copies and differ",
                    places=(
                        Place(process=first.index, text="puts its copy", stack=put.stack),
                        Place(process=other.index, text="puts another", stack=twin.stack),
                    ),
                    details=(f"{len(differ)} of its pieces are on both processes and differ: {min(differ)}",),
                )


def hints(launch: Launch) -> tuple[str, ...]:
    """What near the user's line of a launch can make it differ between processes.

    Args:
        launch: A launch that differs.
    """
    line = own_line(launch.stack)
    if line is None:
        return ()
    found = []
    for number in range(max(1, line.line - HINT_LINES), line.line + 1):
        text = linecache.getline(line.file, number).strip()
        reasons = (why for what, why in HINTS.items() if re.search(what, text))
        found += [f"{shown(line.file)}:{number} has `{text}`: {why}" for why in reasons]
    return tuple(found)


def _token(launch: Launch) -> tuple[object, ...]:
    """What two launches must have in common to belong together for sure: the program and the user's own line."""
    return (launch.program.key, _line(launch))


def _line(launch: Launch) -> str:
    line = own_line(launch.stack)
    return line.place if line else ""


def _equal_elsewhere(one: Launch, other: Launch) -> bool:
    """The same program from another line, as in the two branches of an if."""
    return one.program.key == other.program.key and _line(one) != _line(other)


def _differ(one: Launch, other: Launch) -> bool:
    """The same name at the same line, or a name that says something: one program that differs, and not two."""
    if one.program.name != other.program.name or one.program.key == other.program.key:
        return False
    return _line(one) == _line(other) or NAMELESS not in one.program.name


def _matched(
    left: Mapping[int, Launch], right: Mapping[int, Launch], same: Callable[[Launch, Launch], bool]
) -> list[tuple[int, int]]:
    """Pairs of the two by their numbers, in the order of both."""
    found: list[tuple[int, int]] = []
    rest = dict(right)
    for x, one in left.items():
        y = next((y for y, other in rest.items() if same(one, other)), None)
        if y is not None:
            found.append((x, y))
            rest = {each: launch for each, launch in rest.items() if each > y}
    return found


def _different(first: ProcessLog, one: Launch, other: ProcessLog, another: Launch) -> Finding:
    mine, theirs = one.program, another.program
    lines = [
        line.strip()
        for line in difflib.unified_diff(mine.text.splitlines(), theirs.text.splitlines(), lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    only_numbers = mine.arguments == theirs.arguments and _without_numbers(mine.text) == _without_numbers(theirs.text)
    kind = "values" if only_numbers and mine.text != theirs.text else "different_program"
    text = (
        f"a number that {mine.name} has as a constant differs"
        if kind == "values"
        else f"both launch {mine.name}, but not the same program"
    )
    return Finding(
        kind=kind,
        text=text,
        places=(
            Place(process=first.index, text=f"launches {_program(one)}", stack=one.stack),
            Place(process=other.index, text=f"launches {_program(another)}", stack=another.stack),
        ),
        details=(*lines[:SHOWN_LINES], *hints(one)),
    )


def _order(first: ProcessLog, one: Launch, other: ProcessLog, another: Launch) -> Finding:
    return Finding(
        kind="order",
        text=f"both launch {one.program.name}, but not between the same other programs",
        places=(
            Place(process=first.index, text=f"launches {_program(one)}", stack=one.stack),
            Place(process=other.index, text=f"launches {_program(another)}, earlier or later", stack=another.stack),
        ),
        details=hints(one),
    )


def _alone(one: ProcessLog, launch: Launch, another: ProcessLog, following: Sequence[Launch], waits: bool) -> Finding:
    if waits:
        place = _whereabouts(another)
    elif following:
        name = following[0].program.name
        place = Place(process=another.index, text=f"launches {name} next, not this", stack=following[0].stack)
    else:
        place = Place(process=another.index, text="launches nothing more")
    devices = "devices of several processes" if launch.program.shared else "devices of this process alone"
    return Finding(
        kind="some_enter" if waits else "one_process",
        text=f"{launch.program.name}, on {devices}",
        places=(
            Place(
                process=one.index, text=f"{'waits in' if waits else 'launches'} {_program(launch)}", stack=launch.stack
            ),
            place,
        ),
        details=(
            ()
            if launch.program.shared
            else ("A program on a process's own devices is allowed by JAX, yet runs on pods have failed with it.",)
        )
        + hints(launch),
    )


def _whereabouts(log: ProcessLog) -> Place:
    """Where a process is that others wait for."""
    if log.ended:
        return Place(process=log.index, text="has come to its end")
    if log.error is not None:
        return Place(process=log.index, text=f"has failed: {log.error[0].splitlines()[0]}", stack=log.error[1])
    main = log.where.get("MainThread")
    if main is not None:
        return Place(process=log.index, text="is elsewhere", stack=main.stack)
    return Place(process=log.index, text="was elsewhere when the run ended")


def _program(launch: Launch) -> str:
    types = [*launch.program.arguments[:4], *(["..."] if len(launch.program.arguments) > 4 else [])]
    return f"{launch.program.name}({', '.join(types)})"


def _without_numbers(text: str) -> str:
    return re.sub(r"dense<[^>]*>", "dense<>", text)


def _by_line(puts: Sequence[Put]) -> dict[tuple[str, str], list[Put]]:
    found: dict[tuple[str, str], list[Put]] = collections.defaultdict(list)
    for put in puts:
        line = own_line(put.stack)
        found[put.array, line.place if line else ""].append(put)
    return found
