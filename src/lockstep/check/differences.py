"""Findings from two processes that differ, in words: their launches, the values of arguments, pieces of arrays."""

import collections
import dataclasses
import difflib
import functools
import itertools
import linecache
import re
from collections.abc import Iterator

from lockstep.check.findings import Finding, Place, own_line, shown
from lockstep.check.log import Launch, ProcessLog, Put

SHOWN_LINES = 6  # lines of two programs that are shown where they differ
HINTS = {
    r"(?<![.\w])set\(|frozenset\(|\bin \{": "the order of a set of strings differs between processes",
    r"listdir|iterdir|glob\(|scandir": "the order of a directory listing differs between machines",
    r"\btime\.|perf_counter|datetime|monotonic\(": "clocks differ between processes",
    r"\bhash\(|uuid|getpid|gethostname": "it differs between processes",
    r"(?<!jax\.)(?<!jr\.)\brandom\.(random|randint|randrange|getrandbits|uniform|choices?|shuffle|sample|gauss|rand|randn|"
    r"normal|permutation)\((?![\w.]*(key|rng))|(default_rng|RandomState|\bRandom)\(\)": "without a seed it differs "
    "between processes",
}
"""Patterns of lines near a launch that can make it differ, and why."""
HINT_LINES = 8  # lines above a launch that are looked through for that


def hints(launch: Launch) -> tuple[str, ...]:
    """Lines near the user's line of a launch that can make it differ between processes."""
    line = own_line(launch.stack)
    if line is None:
        return ()
    lines = []
    for number in range(max(1, line.line - HINT_LINES), line.line + 1):
        text = linecache.getline(line.file, number).strip()
        reasons = (why for pattern, why in HINTS.items() if re.search(pattern, text))
        lines += [f"{shown(line.file)}:{number} has `{text}`: {why}" for why in reasons]
    return tuple(lines)


def different(first: ProcessLog, launch: Launch, second: ProcessLog, twin: Launch) -> Finding:
    """Both launch a program of the same name that differs."""
    program, twin_program = launch.program, twin.program
    only_numbers = program.arguments == twin_program.arguments and _without_numbers(program.text) == _without_numbers(
        twin_program.text
    )
    kind = "values" if only_numbers and program.text != twin_program.text else "different_program"
    text = (
        f"a number that {program.name} has as a constant differs"
        if kind == "values"
        else f"both launch {program.name}, but not the same program"
    )
    return Finding(
        kind=kind,
        text=text,
        places=(
            Place(process=first.index, text=f"launches {_program(launch)}", stack=launch.stack),
            Place(process=second.index, text=f"launches {_program(twin)}", stack=twin.stack),
        ),
        details=(*_changed_lines(program.text, twin_program.text), *hints(launch)),
    )


def order(first: ProcessLog, launch: Launch, second: ProcessLog, twin: Launch) -> Finding:
    """Both launch the same, but not in the same place."""
    return Finding(
        kind="order",
        text=f"both launch {launch.program.name}, but not between the same other programs",
        places=(
            Place(process=first.index, text=f"launches {_program(launch)}", stack=launch.stack),
            Place(process=second.index, text=f"launches {_program(twin)}, earlier or later", stack=twin.stack),
        ),
        details=hints(launch),
    )


def alone(log: ProcessLog, launch: Launch, absent_log: ProcessLog, following: Launch | None, waits: bool) -> Finding:
    """One process launches what another does not."""
    if waits:
        place = _whereabouts(absent_log)
    elif following is not None:
        name = following.program.name
        place = Place(process=absent_log.index, text=f"launches {name} next, not this", stack=following.stack)
    else:
        place = Place(process=absent_log.index, text="launches nothing more")
    devices = "devices of several processes" if launch.program.shared else "devices of this process alone"
    allowed = "A program on a process's own devices is allowed by JAX, yet runs on pods have failed with it."
    doing = f"{'waits in' if waits else 'launches'} {_program(launch)}"
    return Finding(
        kind="some_enter" if waits else "one_process",
        text=f"{launch.program.name}, on {devices}",
        places=(Place(process=log.index, text=doing, stack=launch.stack), place),
        details=(*(() if launch.program.shared else (allowed,)), *hints(launch)),
    )


def _whereabouts(log: ProcessLog) -> Place:
    """The place of a process that others wait for."""
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


@functools.lru_cache(maxsize=64)
def _changed_lines(text: str, twin_text: str) -> tuple[str, ...]:
    diff = difflib.unified_diff(text.splitlines(), twin_text.splitlines(), lineterm="", n=0)
    changed = (line for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---"))
    return tuple(line.strip() for line in itertools.islice(changed, SHOWN_LINES))


MOST_AHEAD = 10_000
"""Arrays that one process may put at a line before the other does; with more, the line is not compared."""


def compare_arguments(first: ProcessLog, second: ProcessLog, launch: Launch, twin: Launch) -> Iterator[Finding]:
    """Arguments of which each process has its own copy, and that differ."""
    for (position, digest, short), (_, other_digest, other_short) in zip(launch.values, twin.values, strict=False):
        if digest != other_digest:
            name = launch.program.name
            yield Finding(
                kind="values",
                text=f"argument {position} of {name}, of which each process passes its own copy, differs",
                places=(
                    Place(process=first.index, text=f"passes {short}", stack=launch.stack),
                    Place(process=second.index, text=f"passes {other_short}", stack=twin.stack),
                ),
                details=hints(launch),
            )


class PutComparison:
    """Compare the arrays that two processes put together, by the line that does it.

    Where one of them puts more at a line than the other, it is not known which belong together: what differs
    is said when both have put as many.
    """

    def __init__(self, first: ProcessLog, second: ProcessLog) -> None:
        self._logs = (first, second)
        self._lines: dict[tuple[str, str], _PutsAtLine] = collections.defaultdict(_PutsAtLine)

    def add(self, side: int, put: Put) -> Iterator[Finding]:
        """Take in the next array of the first process (side 0) or of the other (1)."""
        own = own_line(put.stack)
        line = self._lines[put.array, own.place if own else ""]
        if line.given_up:
            return
        line.waiting[side].append(put)
        if all(line.waiting):
            finding = self._compare(*(queue.popleft() for queue in line.waiting))
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
        first, second = self._logs
        return Finding(
            kind="values",
            text=f"an array {put.array} is put together from pieces that should be copies and differ",
            places=(
                Place(process=first.index, text="puts its copy", stack=put.stack),
                Place(process=second.index, text="puts another", stack=twin.stack),
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
