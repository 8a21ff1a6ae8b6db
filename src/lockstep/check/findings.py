"""The kinds of findings, with what each would do on a pod and what to change, and places in the user's code."""

import dataclasses
import functools
import linecache
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

DEEPEST = 24  # frames that are kept of a stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a call stack."""

    file: str
    line: int  # the line's number, from 1
    function: str
    text: str
    own: bool  # whether it is the user's, not that of an installed package

    @property
    def place(self) -> str:
        """File and line, as editors open them."""
        return f"{self.file}:{self.line}"


Key = tuple[tuple[str, int, str], ...]  # a stack as (file, line, function), the innermost frame first

_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_LOCKSTEP = str(Path(__file__).parents[1]) + "/"
_HIDDEN = ("/site-packages/jax/", "/site-packages/jaxlib/", "/lockstep/check/")
_HIDDEN_ENDS = ("/contextlib.py", "/functools.py", "/threading.py", "/concurrent/futures/thread.py")


def walk(frame: FrameType | None) -> Key:
    """The stack from a frame outwards, without the frames of JAX and of the check."""
    stack: list[tuple[str, int, str]] = []
    while frame is not None and len(stack) < DEEPEST:
        code = frame.f_code
        if not is_hidden(code.co_filename):
            stack.append((code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return tuple(stack)


def here() -> Key:
    """The stack of the caller."""
    return walk(sys._getframe(1))


@functools.cache
def is_hidden(file: str) -> bool:
    """Whether a file is JAX's or ours, has no text, or only calls others."""
    if file.startswith("<") or any(part in file for part in _HIDDEN):
        return True
    return file.startswith(_LIBRARY) and file.endswith(_HIDDEN_ENDS)


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is the user's: not installed, not of Python, not of Lockstep."""
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return not installed and not file.startswith((*_LIBRARY, _LOCKSTEP))


def frames(key: Key) -> tuple[Frame, ...]:
    """A stack with the texts of its lines."""
    return tuple(
        Frame(file=file, line=line, function=function, text=linecache.getline(file, line).strip(), own=is_own(file))
        for file, line, function in key
    )


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line of a stack that is the user's; where none is, the innermost of all."""
    return next((frame for frame in stack if frame.own), stack[0] if stack else None)


def shown(path: str) -> str:
    """A path relative to the working directory where it is in it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of finding; docs/check.md has a row for each."""

    name: str  # its name, as in `--ignore` and in the JSON report
    title: str
    on_pod: str
    fix: str


HALT: Final = (
    "'The program continuator has halted unexpectedly' or 'An unexpected peer shows up in the launch group with a "
    "different launch id than the current group leader'"
)

KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind(
            name="one_process",
            title="a program that only some processes launch",
            on_pod=f"from there on the processes launch different programs: the job hangs, or ends with {HALT}.",
            fix="Launch it on all processes and let only one use the result; or keep to NumPy there: move arrays to "
            "the host on every process first (jax.device_get), and guard that part with jax.no_execution(True).",
        ),
        Kind(
            name="order",
            title="the same programs in another order",
            on_pod=f"the chips of one process wait in one program and the others in another: a hang, or {HALT}.",
            fix="Give the launches one order on all processes: sort what is iterated over (sets, directory listings, "
            "results of threads), and let nothing local such as time decide.",
        ),
        Kind(
            name="different_program",
            title="programs of the same name that differ",
            on_pod=f"the collectives of the two do not fit together: a hang, a core that halts, or {HALT}.",
            fix="Make shapes, dtypes, static arguments and everything the function reads at tracing equal on all "
            "processes: pad the last batch, broadcast what was read or measured locally.",
        ),
        Kind(
            name="thread",
            title="launches of programs of several processes from more than one thread",
            on_pod="the order between the threads is up to the operating system and differs between processes: now and "
            f"then a hang, or {HALT}.",
            fix="Launch from one thread only; hand others NumPy arrays. jax.thread_guard(True) raises where a second "
            "thread launches.",
        ),
        Kind(
            name="comparison",
            title="a value that is put on several hosts by device_put is sent to all of them to be compared",
            on_pod="it is a collective in disguise: slow, as every host gets every host's copy, out of memory for "
            "large arrays, and a hang where one process does not take part.",
            fix="Use jax.make_array_from_process_local_data or jax.make_array_from_callback, which send nothing; or "
            "pass NumPy arrays to the jitted function.",
        ),
        Kind(
            name="values",
            title="values that JAX takes to be equal on all processes, and that differ",
            on_pod="no error: the copies of an array differ between hosts, so that results depend on where they are "
            "read, losses differ between hosts, and training goes wrong in silence.",
            fix="Broadcast the value from one process (jax.experimental.multihost_utils.broadcast_one_to_all), or make "
            "it of what is equal everywhere: the step number, a seed from the configuration.",
        ),
        Kind(
            name="retrace",
            title="a program that is traced and compiled again after it was in use",
            on_pod="each compilation takes minutes for a large model; where processes do it at different steps the "
            "others wait, and collectives time out.",
            fix="Keep shapes, dtypes and shardings of the arguments the same, pass what changes from step to step as "
            "an array and not as a Python value, and make jitted functions once, outside the loop.",
        ),
        Kind(
            name="growth",
            title="live arrays or keys of the coordination service that grow from step to step",
            on_pod="RESOURCE_EXHAUSTED: out of device memory (HBM) after hours; keys fill the memory of process 0 "
            "until the coordination service dies, and the job with it.",
            fix="Do not collect device arrays over steps: convert what is kept (float(x), jax.device_get). Delete keys "
            "when every process has read them.",
        ),
        Kind(
            name="donated",
            title="an array that was donated is used again",
            on_pod="'Array has been deleted' or 'Buffer has been deleted or donated'; where one process alone swallows "
            f"that error the others have launched and it has not: a hang, or {HALT}.",
            fix="Take the array that the donating call returned, or copy what is needed before the call.",
        ),
        Kind(
            name="some_enter",
            title="processes wait in a collective that others never enter",
            on_pod="the job hangs until a watchdog or a time-out ends it ('barrier timed out', DEADLINE_EXCEEDED), "
            f"or it ends with {HALT}.",
            fix="Call it on every process, also on those with nothing to contribute, and let no process return, raise "
            "or skip before it.",
        ),
    )
}
"""By name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The part of one process in a finding."""

    process: int
    text: str  # what it does
    stack: tuple[Frame, ...] = ()  # where, the innermost frame first; empty: nowhere

    @property
    def line(self) -> Frame | None:
        return own_line(self.stack)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that would go wrong on a pod."""

    kind: str
    text: str  # what was seen, in a sentence
    places: tuple[Place, ...]
    count: int = 1
    details: tuple[str, ...] = ()  # more lines: what differs, what grew

    @property
    def about(self) -> Kind:
        return KINDS[self.kind]

    @property
    def key(self) -> tuple[str, str]:
        """Its kind, and the user's line of its first place."""
        line = self.places[0].line
        return self.kind, line.place if line else ""

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "title": self.about.title,
            "text": self.text,
            "count": self.count,
            "details": list(self.details),
            "on_pod": self.about.on_pod,
            "fix": self.about.fix,
            "places": [
                {
                    "process": place.process,
                    "text": place.text,
                    "line": place.line.place if place.line else None,
                    "source": place.line.text if place.line else None,
                    "stack": [f"{frame.place} {frame.function}" for frame in place.stack],
                }
                for place in self.places
            ],
        }


class Findings:
    """The findings of a run as they were first seen, those of the same kind at the same line counted together."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Finding] = {}

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def add(self, finding: Finding) -> bool:
        """Take one in, and say whether it is the first of its kind at its line."""
        key, known = finding.key, self._found.get(finding.key)
        if known is None:
            self._found[key] = finding
            return True
        there = {place.process for place in known.places}
        more = tuple(place for place in finding.places if place.process not in there)
        again = finding.count if not more and finding.places[0].process == known.places[0].process else 0
        self._found[key] = dataclasses.replace(known, places=known.places + more, count=known.count + again)
        return False
