"""Findings from what one process does: threads, comparisons, recompilation, growth, donated arrays."""

import collections
from collections.abc import Iterator, Sequence

from lockstep.check.findings import Finding, Place
from lockstep.check.log import Launch, ProcessLog
from lockstep.check.stack import own_line
from lockstep.units import bytes_text

POD_HOSTS = 64
"""Hosts of the pod for which bytes are given."""
COMPARED_BYTES = 1 << 20
"""Bytes that a comparison takes on such a pod, from which on it is a finding."""
IN_USE = 3
"""Launches after which a program is in use, and should not be compiled again."""
GROWING_STEPS = 6
"""Looks at the live arrays, one at each step, in which they grew."""
LATE = 0.75
"""The part of a run in which a step is still launched."""


def look_at(log: ProcessLog) -> Iterator[Finding]:
    """What is wrong with one process by itself.

    Args:
        log: What it recorded.
    """
    yield from _threads(log)
    yield from _comparisons(log)
    yield from _retraces(log)
    yield from _growth(log)
    yield from _donated(log)


def _threads(log: ProcessLog) -> Iterator[Finding]:
    shared = [each for each in log.launches if each.program.shared]
    if not shared:
        return
    home = log.home
    at_home = next(each for each in shared if each.thread == home)
    for each in shared:
        if each.thread == home:
            at_home = each
            continue
        yield Finding(
            kind="thread",
            text=f"{each.program.name} is launched from thread {each.thread!r}, others are not",
            places=(
                Place(process=log.index, text=f"launches it from {each.thread!r}", stack=each.stack),
                Place(
                    process=log.index,
                    text=f"launches {at_home.program.name} from {home or 'MainThread'!r}",
                    stack=at_home.stack,
                ),
            ),
        )


def _comparisons(log: ProcessLog) -> Iterator[Finding]:
    for each in log.comparisons:
        on_pod = each.size * POD_HOSTS
        if on_pod >= COMPARED_BYTES:
            yield Finding(
                kind="comparison",
                text=f"device_put of {bytes_text(each.size)}: with {POD_HOSTS} hosts each of them receives "
                f"{bytes_text(on_pod)} to compare",
                places=(Place(process=log.index, text="puts a host array on several hosts", stack=each.stack),),
            )


def _retraces(log: ProcessLog) -> Iterator[Finding]:
    at_line: dict[tuple[str, str], list[Launch]] = collections.defaultdict(list)
    for each in log.launches[_training_began(log) :]:
        line = own_line(each.stack)
        if line is None or not line.own:
            continue
        before = at_line[each.program.name, line.place]
        if _is_new(each, before) and _was_in_use(each, before) and not _is_first_variant(each, before):
            yield Finding(
                kind="retrace",
                text=f"{each.program.name} was launched {len(before)} times here and is then compiled again",
                places=(Place(process=log.index, text="launches it", stack=each.stack),),
                details=_what_changed(before[-1], each),
            )
        before.append(each)


def _training_began(log: ProcessLog) -> int:
    """The index of the first launch of the step: what comes most often from one line, and until the end.

    What is made before may have many shapes: an optimizer's state is made by one eager operation after another.
    """
    at: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for index, each in enumerate(log.launches):
        line = own_line(each.stack)
        at[each.program.name, "" if line is None else line.place].append(index)
    late = [each for each in at.values() if each[-1] >= len(log.launches) * LATE]
    return max(late, key=len, default=[0])[0]


def _is_new(launch: Launch, before: Sequence[Launch]) -> bool:
    return all(each.program.number != launch.program.number for each in before)


def _was_in_use(launch: Launch, before: Sequence[Launch]) -> bool:
    """Whether the last launches there needed no new program, or needed the same one again and again."""
    last = before[-IN_USE:]
    if len(last) < IN_USE:
        return False
    same = all(each.program.digest == launch.program.digest for each in last)
    return same or all(each.program.number == last[0].program.number for each in last)


def _is_first_variant(launch: Launch, before: Sequence[Launch]) -> bool:
    """Whether it is an operation that has had one shape here until now: a line of a library may well need a second."""
    return launch.program.operation and len({each.program.number for each in before}) == 1


def _what_changed(before: Launch, now: Launch) -> tuple[str, ...]:
    old, new = before.program, now.program
    if len(old.arguments) != len(new.arguments):
        return (f"it had {len(old.arguments)} arguments and has {len(new.arguments)}",)
    changed = [
        f"argument {position}: {one} became {other}"
        for position, (one, other) in enumerate(zip(old.arguments, new.arguments, strict=True))
        if one != other
    ]
    if changed:
        return tuple(changed)
    if old.digest == new.digest:
        return ("nothing changed: it is another function object each time (jax.jit, lambda or partial in the loop)",)
    return ("a static argument or a value that it reads at tracing changed: the types of its arguments are the same",)


def _growth(log: ProcessLog) -> Iterator[Finding]:
    steps = _steps(log)
    if len(steps) < GROWING_STEPS:
        return
    arrays, keys = [each.live or 0 for each in steps], [each.keys for each in steps]
    last = steps[-1]
    if _grows(arrays):
        yield Finding(
            kind="growth",
            text=f"live arrays grow from {arrays[0]} to {arrays[-1]} in {len(steps) - 1} steps",
            places=_makers(log, steps[0], last)
            or (Place(process=log.index, text="launches the step", stack=last.stack),),
        )
    if _grows(keys):
        yield Finding(
            kind="growth",
            text=f"keys of the coordination service grow from {keys[0]} to {keys[-1]} in {len(steps) - 1} steps",
            places=_setters(log, steps[0], last)
            or (Place(process=log.index, text="launches the step", stack=last.stack),),
        )


def _steps(log: ProcessLog) -> list[Launch]:
    """The launches of the step: the one that comes most often and until the end; without the first third of them."""
    at: dict[tuple[int, tuple[object, ...]], list[int]] = collections.defaultdict(list)
    for index, each in enumerate(log.launches):
        if each.live is not None and not each.thread:
            at[each.program.number, each.stack].append(index)
    # A loop that initialises parameters adds arrays too, and ends long before the run does.
    late = [each for each in at.values() if each[-1] >= len(log.launches) * LATE]
    steps = max(late, key=len, default=[])
    return [log.launches[index] for index in steps[len(steps) // 3 :]]


def _grows(counts: Sequence[int]) -> bool:
    return all(after > before for before, after in zip(counts, counts[1:], strict=False))


def _makers(log: ProcessLog, first: Launch, last: Launch) -> tuple[Place, ...]:
    """Where the arrays were made that are more now."""
    before = {(kind, stack): count for kind, stack, count in first.kinds}
    more = [(count - before.get((kind, stack), 0), kind, stack) for kind, stack, count in last.kinds]
    most = sorted((each for each in more if each[0] > 0 and each[2]), key=lambda each: -each[0])[:3]
    return tuple(
        Place(process=log.index, text=f"{count} more {kind} that are made here", stack=stack)
        for count, kind, stack in most
    )


def _setters(log: ProcessLog, first: Launch, last: Launch) -> tuple[Place, ...]:
    """Where the most keys were set that are more now; one that is set again and again is no more."""
    before = {stack: count for _, stack, count in first.setters}
    more = [(count - before.get(stack, 0), key, stack) for key, stack, count in last.setters]
    most = sorted((each for each in more if each[0] > 0), key=lambda each: -each[0])[:1]
    return tuple(Place(process=log.index, text=f"sets {key!r}", stack=stack) for _, key, stack in most)


def _donated(log: ProcessLog) -> Iterator[Finding]:
    for each in log.launches:
        for position, giver in each.donated:
            yield Finding(
                kind="donated",
                text=f"argument {position} of {each.program.name} was given away before",
                places=(
                    Place(process=log.index, text="uses it", stack=each.stack),
                    Place(process=log.index, text="has donated it", stack=giver),
                ),
            )
