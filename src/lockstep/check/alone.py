"""Findings from what one process does: threads, comparisons, recompilation, growth, donated arrays."""

import collections
import dataclasses
from collections.abc import Iterator

from lockstep.check.findings import Finding, Place, own_line
from lockstep.check.log import Comparison, Event, Launch, ProcessLog
from lockstep.printable import bytes_text

POD_HOSTS = 64  # hosts of the pod for which bytes are given
COMPARED_BYTES = 1 << 20  # bytes that a comparison takes on such a pod, from which on it is a finding
IN_USE = 3  # launches after which a program is in use, and should not be compiled again
GROWING_STEPS = 6  # looks at the live arrays, one at each step, in which they grew
LATE = 0.75  # the part of a run in which a step is still launched


class ProcessChecks:
    """The checks of one process by itself, as it goes on."""

    def __init__(self, log: ProcessLog) -> None:
        self._log = log
        self._seen = 0
        self._shared: dict[str, Launch] = {}
        self._lines: dict[tuple[str, str], _LaunchesAtLine] = collections.defaultdict(_LaunchesAtLine)
        self._steps: dict[tuple[int, tuple[object, ...]], _Samples] = {}

    def see(self, event: Event) -> Iterator[Finding]:
        """Take in what the process does next, and say what is wrong with it for sure."""
        if isinstance(event, Comparison):
            yield from self._comparison(event)
        elif isinstance(event, Launch):
            if event.program.shared:
                yield from self._thread(event)
            yield from self._donated(event)
            self._lines[event.program.name, event.place].add(self._seen, event)
            if event.live is not None and not event.thread:
                at = (event.program.number, event.stack)
                self._steps.setdefault(at, _Samples()).add(self._seen, event)
            self._seen += 1

    def rest(self) -> Iterator[Finding]:
        """Findings that need to know which launch is the step, and so the end: programs compiled again, and growth."""
        late = [line for line in self._lines.values() if line.last >= self._seen * LATE]
        began = max(late, key=lambda line: line.count, default=_LaunchesAtLine()).first
        for line in self._lines.values():
            yield from line.retraces(self._log.index, began)
        looked_at = [step for step in self._steps.values() if step.count >= IN_USE]
        functions = [step for step in looked_at if not step.is_operation]  # operations may go through a model's leaves
        samples = [step for step in functions or looked_at if step.last >= self._seen * LATE]
        if samples:
            yield from max(samples, key=lambda step: step.count).growth(self._log.index)

    def _thread(self, launch: Launch) -> Iterator[Finding]:
        is_new = launch.thread not in self._shared
        self._shared[launch.thread] = launch
        if len(self._shared) < 2:
            return
        home = self._log.home
        launches = [shared for thread, shared in self._shared.items() if thread != home]
        for foreign in launches if is_new and launch.thread == home else [launch] if launch.thread != home else ():
            yield Finding(
                kind="thread",
                text=f"{foreign.program.name} is launched from thread {foreign.thread!r}, others are not",
                places=(
                    self._place(f"launches it from {foreign.thread!r}", foreign),
                    self._place(
                        f"launches {self._shared[home].program.name} from {home or 'MainThread'!r}", self._shared[home]
                    ),
                ),
            )

    def _comparison(self, event: Comparison) -> Iterator[Finding]:
        on_pod = event.size * POD_HOSTS
        if on_pod >= COMPARED_BYTES:
            yield Finding(
                kind="comparison",
                text=f"device_put of {bytes_text(event.size)}: with {POD_HOSTS} hosts each of them receives "
                f"{bytes_text(on_pod)} to compare",
                places=(self._place("puts a host array on several hosts", event),),
            )

    def _donated(self, launch: Launch) -> Iterator[Finding]:
        for position, giver in launch.donated:
            yield Finding(
                kind="donated",
                text=f"argument {position} of {launch.program.name} was given away before",
                places=(
                    self._place("uses it", launch),
                    Place(process=self._log.index, text="has donated it", stack=giver),
                ),
            )

    def _place(self, text: str, event: Event) -> Place:
        return Place(process=self._log.index, text=text, stack=event.stack)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recompilation:
    """A program that is compiled for a line where another one was in use."""

    launch: Launch  # its first launch there
    before: Launch  # the last launch of the other one
    number: int  # how many launches there were at the line
    used: int  # the index of the first of the launches that show that the other one was in use
    changed: int  # the index of the last launch of a third program there, -1 where there was none

    def counts(self, began: int) -> bool:
        """Whether it is a retrace after the first step, and not an operation that has had one shape until then.

        A line of a library may well need a second.
        """
        is_first_variant = self.launch.program.operation and self.changed < began
        return self.used >= began and not is_first_variant


class _LaunchesAtLine:
    """The launches of programs of one name at one line."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        self.last = -1
        self._numbers: set[int] = set()
        self._latest: collections.deque[tuple[int, Launch]] = collections.deque(maxlen=IN_USE)
        self._changed = -1
        self._compiled: list[_Recompilation] = []

    def add(self, index: int, launch: Launch) -> None:
        if not self.count:
            self.first = index
        program = launch.program
        if program.number not in self._numbers and self._in_use(program.digest):
            before = self._latest[-1][1]
            used = self._latest[0][0]
            self._compiled.append(
                _Recompilation(launch=launch, before=before, number=self.count, used=used, changed=self._changed)
            )
        if self._latest and self._latest[-1][1].program.number != program.number:
            self._changed = self.last
        self._numbers.add(program.number)
        self._latest.append((index, launch))
        self.count += 1
        self.last = index

    def retraces(self, index: int, began: int) -> Iterator[Finding]:
        """The programs that were compiled again.

        Args:
            began: The index of the first launch of the step. What is made before may have many shapes: an optimizer's
                state is made by one eager operation after another.
        """
        for compiled in self._compiled:
            line = own_line(compiled.launch.stack)
            if line is not None and line.own and compiled.counts(began):
                yield Finding(
                    kind="retrace",
                    text=f"{compiled.launch.program.name} was launched {compiled.number} times here and is then "
                    "compiled again",
                    places=(Place(process=index, text="launches it", stack=compiled.launch.stack),),
                    details=_what_changed(compiled.before, compiled.launch),
                )

    def _in_use(self, digest: str) -> bool:
        """Whether the last launches there needed no new program, or needed the same one again and again."""
        programs = [launch.program for _, launch in self._latest]
        if len(programs) < IN_USE:
            return False
        same = all(program.digest == digest for program in programs)
        return same or all(program.number == programs[0].number for program in programs)


class _Samples:
    """The looks at the live arrays, and the keys, at the launches of a program from one stack."""

    def __init__(self) -> None:
        self.count = 0
        self.last = -1
        self._newest: Launch | None = None
        self._arrays: tuple[int, Launch] | None = None
        self._keys: tuple[int, Launch] | None = None

    @property
    def is_operation(self) -> bool:
        return self._newest is not None and self._newest.program.operation

    def add(self, index: int, launch: Launch) -> None:
        if self._newest is None or (launch.live or 0) <= (self._newest.live or 0):
            self._arrays = (self.count, launch)  # from here on they may grow
        if self._newest is None or launch.keys <= self._newest.keys:
            self._keys = (self.count, launch)
        self._newest = launch
        self.count += 1
        self.last = index

    def growth(self, index: int) -> Iterator[Finding]:
        """Arrays and keys that grew at every step but the first third of them."""
        now, third = self._newest, self.count // 3
        if now is None or self._arrays is None or self._keys is None or self.count - third < GROWING_STEPS:
            return
        step = Place(process=index, text="launches the step", stack=now.stack)
        at, then = self._arrays
        if at <= third:
            yield Finding(
                kind="growth",
                text=f"live arrays grow from {then.live} to {now.live} in {self.count - 1 - at} steps",
                places=_makers(index, then, now) or (step,),
            )
        at, then = self._keys
        if at <= third:
            yield Finding(
                kind="growth",
                text=f"keys of the coordination service grow from {then.keys} to {now.keys} in "
                f"{self.count - 1 - at} steps",
                places=_setters(index, then, now) or (step,),
            )


def _what_changed(before: Launch, now: Launch) -> tuple[str, ...]:
    old, new = before.program, now.program
    if len(old.arguments) != len(new.arguments):
        return (f"it had {len(old.arguments)} arguments and has {len(new.arguments)}",)
    changed = [
        f"argument {position}: {type_before} became {type_now}"
        for position, (type_before, type_now) in enumerate(zip(old.arguments, new.arguments, strict=True))
        if type_before != type_now
    ]
    if changed:
        return tuple(changed)
    if old.digest == new.digest:
        return ("nothing changed: it is another function object each time (jax.jit, lambda or partial in the loop)",)
    return ("a static argument or a value that it reads at tracing changed: the types of its arguments are the same",)


def _makers(index: int, first: Launch, last: Launch) -> tuple[Place, ...]:
    """The places where the arrays were made that are more now."""
    before = {(kind, stack): count for kind, stack, count in first.kinds}
    more = [(count - before.get((kind, stack), 0), kind, stack) for kind, stack, count in last.kinds]
    most = sorted((growth for growth in more if growth[0] > 0 and growth[2]), key=lambda growth: -growth[0])[:3]
    return tuple(
        Place(process=index, text=f"{count} more {kind} that are made here", stack=stack) for count, kind, stack in most
    )


def _setters(index: int, first: Launch, last: Launch) -> tuple[Place, ...]:
    """The place where the most keys were set that are more now; one that is set again and again is no more."""
    before = {stack: count for _, stack, count in first.setters}
    more = [(count - before.get(stack, 0), key, stack) for key, stack, count in last.setters]
    most = sorted((growth for growth in more if growth[0] > 0), key=lambda growth: -growth[0])[:1]
    return tuple(Place(process=index, text=f"sets {key!r}", stack=stack) for _, key, stack in most)
