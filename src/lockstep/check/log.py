"""What the processes of a checked run recorded, read back."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from lockstep.check.stack import Frame, frames

NO_EXECUTION = "no_execution"
"""In the error of a launch that ``jax.no_execution`` refused: that was none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program of one process.

    Args:
        number: Which one of this process it is; one that is compiled again is another.
        name: JAX's name of it.
        digest: The digest of its StableHLO.
        processes: The processes that it runs on, by number.
        local: The devices of this process, by their places among them.
        arguments: The types of the arguments of the first launch, those left out that it does not use.
        text: Its StableHLO.
        operation: Whether it is an operation of JAX itself, launched by itself, and no function that somebody jitted.
    """

    number: int
    name: str
    digest: str
    processes: tuple[int, ...]
    local: tuple[int, ...]
    arguments: tuple[str, ...]
    text: str
    operation: bool = False

    @property
    def shared(self) -> bool:
        """Whether it runs on devices of several processes."""
        return len(self.processes) > 1

    @property
    def key(self) -> tuple[object, ...]:
        """What must be equal where processes launch the same."""
        return (self.name, self.digest, self.processes if self.shared else self.local)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a program.

    Args:
        program: The program.
        stack: From where, the innermost frame first.
        thread: The name of the thread; empty for the main thread.
        values: Arguments of which each process has its own copy: position, digest, short text.
        donated: Positions of arguments that were given away before, and the stacks of those launches.
        live: The number of live arrays; None where they were not counted.
        kinds: The kinds of live arrays: type, stack where they were made, number.
        keys: The keys of the coordination service that this process has set and not deleted.
        setters: Where they were set: one of them, the stack, number.
    """

    program: Program
    stack: tuple[Frame, ...]
    thread: str = ""
    values: tuple[tuple[int, str, str], ...] = ()
    donated: tuple[tuple[int, tuple[Frame, ...]], ...] = ()
    live: int | None = None
    kinds: tuple[tuple[str, tuple[Frame, ...], int], ...] = ()
    keys: int = 0
    setters: tuple[tuple[str, tuple[Frame, ...], int], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Put:
    """An array that was put together from what the processes have.

    Args:
        array: Its type.
        pieces: The digests of the pieces that this process has, by their places in the array.
        stack: From where.
    """

    array: str
    pieces: dict[str, str]
    stack: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A value that all processes compared.

    Args:
        size: Its bytes.
        stack: From where.
    """

    size: int
    stack: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
    """Where a thread was when nothing was launched for a while.

    Args:
        thread: Its name.
        stack: Its stack.
        compiling: Whether it compiled.
    """

    thread: str
    stack: tuple[Frame, ...]
    compiling: bool


@dataclasses.dataclass(kw_only=True)
class ProcessLog:
    """All that one process recorded, in its order.

    Args:
        index: The process.
    """

    index: int
    launches: list[Launch] = dataclasses.field(default_factory=list)
    puts: list[Put] = dataclasses.field(default_factory=list)
    comparisons: list[Comparison] = dataclasses.field(default_factory=list)
    where: dict[str, Where] = dataclasses.field(default_factory=dict)
    """By thread, since the last launch."""
    error: tuple[str, tuple[Frame, ...]] | None = None
    ended: bool = False

    @property
    def home(self) -> str:
        """The thread that launches programs of several processes; the first one where several do."""
        shared = [each.thread for each in self.launches if each.program.shared]
        return "" if "" in shared or not shared else shared[0]

    @property
    def ordered(self) -> list[Launch]:
        """The launches of that thread, whose order can be compared."""
        home = self.home
        return [each for each in self.launches if each.thread == home]


def read_log(file: Path, index: int) -> ProcessLog:
    """Read what a process recorded; half a line at the end is left out.

    Args:
        file: The file; it need not be there.
        index: The process.
    """
    log = ProcessLog(index=index)
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    keys: dict[int, tuple[tuple[str, int, str], ...]] = {}
    programs: dict[int, Program] = {}

    @functools.cache
    def stack(number: int) -> tuple[Frame, ...]:
        return frames(keys[number]) if number in keys else ()

    for each in map(json.loads, lines):
        match each["is"]:
            case "stack":
                keys[each["id"]] = tuple(tuple(frame) for frame in each["frames"])
            case "program":
                programs[each["id"]] = _program(each)
            case "launch":
                log.where.clear()
                log.launches.append(_launch(each, programs, stack))
            case "refused" if NO_EXECUTION in each["text"]:
                mine = [index for index, launch in enumerate(log.launches) if launch.thread == each["thread"]]
                del log.launches[mine[-1]]
            case "put":
                log.puts.append(Put(array=each["array"], pieces=each["pieces"], stack=stack(each["stack"])))
            case "comparison":
                log.comparisons.append(Comparison(size=each["bytes"], stack=stack(each["stack"])))
            case "where":
                there = Where(thread=each["thread"], stack=stack(each["stack"]), compiling=each["compiling"])
                log.where[there.thread] = there
            case "error":
                log.error = (each["text"], stack(each["stack"]))
            case "end":
                log.ended = True
    return log


def _program(line: dict[str, Any]) -> Program:
    return Program(
        number=line["id"],
        name=line["name"],
        digest=line["digest"],
        processes=tuple(line["processes"]),
        local=tuple(line["local"]),
        arguments=tuple(line["arguments"]),
        text=line["text"],
        operation=line["operation"],
    )


def _launch(line: dict[str, Any], programs: dict[int, Program], stack: Any) -> Launch:
    return Launch(
        program=programs[line["program"]],
        stack=stack(line["stack"]),
        thread=line["thread"],
        values=tuple(tuple(value) for value in line.get("values", ())),
        donated=tuple((position, stack(where)) for position, where in line.get("donated", ())),
        live=line.get("live"),
        kinds=tuple((kind, stack(where), count) for kind, where, count in line.get("kinds", ())),
        keys=line.get("keys", 0),
        setters=tuple((key, stack(where), count) for key, where, count in line.get("setters", ())),
    )
