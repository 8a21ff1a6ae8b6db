"""The records of the processes of a checked run, read while they are written."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from lockstep.check.findings import Frame, frames, own_line

CHUNK = 1 << 18  # bytes that are read of a file at a time
LAUNCH_TIMED_OUT = ("Gloo", "gloo", "Connection reset by peer", "Connection closed by peer")
"""Texts in the error of a process whose launch waited for others in vain."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program of one process."""

    number: int  # which one of this process it is; one that is compiled again is another
    name: str
    digest: str
    processes: tuple[int, ...]  # the processes that it runs on, by number
    local: tuple[int, ...]  # the devices of this process, by their places among them
    arguments: tuple[str, ...]  # the types of the arguments of the first launch, those left out that it does not use
    text: str
    operation: bool = False  # whether it is an operation of JAX by itself, no jitted function

    @property
    def shared(self) -> bool:
        """Whether it runs on devices of several processes."""
        return len(self.processes) > 1

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """The facts that are equal where processes launch the same."""
        return (self.name, self.digest, self.processes if self.shared else self.local)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a program."""

    program: Program
    stack: tuple[Frame, ...]  # from where, the innermost frame first
    thread: str = ""  # the name of the thread; empty for the main thread
    values: tuple[tuple[int, str, str], ...] = ()  # arguments that each process has a copy of: position, digest, text
    donated: tuple[tuple[int, tuple[Frame, ...]], ...] = ()  # arguments given away before: position, stack
    live: int | None = None  # number of live arrays; None where they were not counted
    kinds: tuple[tuple[str, tuple[Frame, ...], int], ...] = ()  # live arrays: type, stack, number
    keys: int = 0  # the keys of the coordination service that this process has set and not deleted
    setters: tuple[tuple[str, tuple[Frame, ...], int], ...] = ()  # one of them, stack, number

    @functools.cached_property
    def place(self) -> str:
        """The user's own line; empty where there is none."""
        line = own_line(self.stack)
        return line.place if line else ""

    @functools.cached_property
    def token(self) -> tuple[object, ...]:
        """The program and the user's own line, which are equal where two launches belong together for sure."""
        return (self.program.key, self.place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Put:
    """An array that was put together from what the processes have."""

    array: str  # its type
    pieces: dict[str, str]  # the digests of the pieces that this process has, by their places in the array
    stack: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A value that all processes compared."""

    size: int
    stack: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreadState:
    """The state of a thread when nothing was launched for a while."""

    thread: str
    stack: tuple[Frame, ...]
    compiling: bool  # whether it compiled
    waiting: bool  # whether the process computed nothing while its devices had not run its last launch


@dataclasses.dataclass(kw_only=True)
class ProcessLog:
    """The state of one process so far."""

    index: int
    launches: int = 0  # their number
    other_threads: int = 0
    """The number of those of programs of this process alone, from other threads than the main one."""
    shared_threads: list[str] = dataclasses.field(default_factory=list)
    """The threads that have launched programs of several processes, in the order of their first one."""
    where: dict[str, ThreadState] = dataclasses.field(default_factory=dict)  # by thread, since the last launch
    error: tuple[str, tuple[Frame, ...]] | None = None
    ended: bool = False

    @property
    def waits_for_devices(self) -> bool:
        """Whether it waits for a launch that its devices do not run."""
        failed = self.error is not None and any(text in self.error[0] for text in LAUNCH_TIMED_OUT)
        return not self.ended and (failed or any(there.waiting for there in self.where.values()))

    @property
    def home(self) -> str:
        """The thread whose launches are compared.

        The main one if it launches programs of several processes, else the first that does.
        """
        return "" if "" in self.shared_threads or not self.shared_threads else self.shared_threads[0]


Event = Launch | Put | Comparison  # an action of a process that is compared


class LogReader:
    """Reads the file of a process as far as it is written; what it keeps grows with programs and lines, not launches.

    Args:
        file: The file; it need not be there yet.
        texts: The StableHLO of programs by digest, which the readers of all processes share.
    """

    def __init__(self, file: Path, index: int, texts: dict[str, str]) -> None:
        self.log = ProcessLog(index=index)
        self._file = file
        self._texts = texts
        self._offset = 0
        self._half = b""
        self._keys: dict[int, tuple[tuple[str, int, str], ...]] = {}
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._programs: dict[int, Program] = {}
        self._plain: dict[bytes, Launch] = {}

    def read(self) -> list[Event]:
        """The next events, at most those of `CHUNK` bytes; empty where no more is written.

        A line that is not written to its end waits for the rest.
        """
        if not self._file.exists():
            return []
        events: list[Event] = []
        while not events:
            with self._file.open("rb") as file:
                file.seek(self._offset)
                read = file.read(CHUNK)
            self._offset += len(read)
            *lines, self._half = (self._half + read).split(b"\n")
            events = [event for event in map(self._event, lines) if event is not None]
            if not read:
                break
        return events

    def _event(self, text: bytes) -> Event | None:
        launch = self._plain.get(text)
        if launch is not None:
            return self._launched(launch)
        line, log = json.loads(text), self.log
        match line["is"]:
            case "stack":
                self._keys[line["id"]] = tuple(tuple(frame) for frame in line["frames"])
            case "program":
                self._programs[line["id"]] = self._program(line)
            case "launch":
                launch = self._launch(line)
                if line.keys() <= {"is", "program", "stack", "thread"}:
                    self._plain[text] = launch
                return self._launched(launch)
            case "put":
                return Put(array=line["array"], pieces=line["pieces"], stack=self._stack(line["stack"]))
            case "comparison":
                return Comparison(size=line["bytes"], stack=self._stack(line["stack"]))
            case "where":
                stack = self._stack(line["stack"])
                log.where[line["thread"]] = ThreadState(
                    thread=line["thread"], stack=stack, compiling=line["compiling"], waiting=line["waiting"]
                )
            case "error":
                log.error = (line["text"], self._stack(line["stack"]))
            case "end":
                log.ended = True
        return None

    def _launched(self, launch: Launch) -> Launch:
        log = self.log
        log.launches += 1
        if log.where:
            log.where.clear()
        if launch.program.shared:
            if launch.thread not in log.shared_threads:
                log.shared_threads.append(launch.thread)
        elif launch.thread:
            log.other_threads += 1
        return launch

    def _stack(self, number: int) -> tuple[Frame, ...]:
        if number not in self._stacks:
            self._stacks[number] = frames(self._keys[number]) if number in self._keys else ()
        return self._stacks[number]

    def _program(self, line: dict[str, Any]) -> Program:
        return Program(
            number=line["id"],
            name=line["name"],
            digest=line["digest"],
            processes=tuple(line["processes"]),
            local=tuple(line["local"]),
            arguments=tuple(line["arguments"]),
            text=self._texts.setdefault(line["digest"], line["text"]),
            operation=line["operation"],
        )

    def _launch(self, line: dict[str, Any]) -> Launch:
        stack = self._stack
        return Launch(
            program=self._programs[line["program"]],
            stack=stack(line["stack"]),
            thread=line["thread"],
            values=tuple(tuple(value) for value in line.get("values", ())),
            donated=tuple((position, stack(where)) for position, where in line.get("donated", ())),
            live=line.get("live"),
            kinds=tuple((kind, stack(where), count) for kind, where, count in line.get("kinds", ())),
            keys=line.get("keys", 0),
            setters=tuple((key, stack(where), count) for key, where, count in line.get("setters", ())),
        )
