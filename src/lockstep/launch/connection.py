"""Connections to a worker: the agent goes over each with a request and answers in frames; a follower keeps one up."""

import contextlib
import dataclasses
import functools
import json
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal

from lockstep.exits import SETUP_FAILED
from lockstep.json_text import parse_json, refused, typed
from lockstep.launch.backend import LaunchError, Transport
from lockstep.printable import printable

GREETING = b"lockstep-agent 1\n"  # the first line of an answer (lockstep.launch.agent.main)
AGENT = "lockstep.launch.agent"
GROUND = ("redact", "files")
"""The modules of `lockstep` that the agent imports; they import none."""
MODULES = ("supervisor", "main")
"""The agent's own modules, each after those that it imports."""
BOOT = (
    "import json,sys,types\n"
    "for name,text in json.loads(sys.stdin.buffer.readline().decode()):\n"
    " module=sys.modules[name]=types.ModuleType(name)\n"
    " exec(compile(text,name,'exec'),module.__dict__)\n"
    f"sys.modules['{AGENT}.main'].main()"
)
"""The program of a worker's Python: take the agent from standard input. Nothing is installed on the worker."""
COMMAND = f"exec python3 -I -c {shlex.quote(BOOT)}"  # the shell command of every connection
STDERR_BYTES = 2000
FRAME_BYTES = 16 << 20
"""Bytes of a frame, and of a line before the greeting, at most: what a setup prints comes line by line."""


class DroppedError(Exception):
    """A connection ended, or never came about, before the worker has answered: the text says what ssh has said."""


@functools.cache
def agent_line() -> bytes:
    """The agent as the first line of a connection."""
    folder = Path(__file__).parent / "agent"
    files = {f"lockstep.{name}": Path(__file__).parents[1] / f"{name}.py" for name in GROUND}
    files |= {f"{AGENT}.{name}": folder / f"{name}.py" for name in MODULES}
    packages = [("lockstep", ""), ("lockstep.launch", ""), (AGENT, "")]
    modules = [(name, file.read_text(encoding="utf-8")) for name, file in files.items()]
    return json.dumps([*packages, *modules]).encode() + b"\n"


class Connection:
    """A request to the agent on one worker, and its answer; ``stays``: words can be sent after it (`send`)."""

    def __init__(
        self,
        transport: Transport,
        worker: int,
        request: dict[str, Any],
        payload: tuple[bytes | Path, ...] = (),
        stays: bool = False,
    ) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        argv = transport.argv(worker, COMMAND)
        try:
            # A session of its own: Ctrl-C at the terminal is for the launcher, which needs its connections.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
            )
        except FileNotFoundError:
            raise LaunchError(f"no program {argv[0]!r} on PATH, with which workers are reached. Install it.") from None
        self._lock = threading.Lock()
        first = agent_line() + json.dumps(request).encode() + b"\n"
        self._writer = threading.Thread(target=self._feed, args=((first, *payload), stays), daemon=True)
        self._writer.start()

    def _feed(self, pieces: tuple[bytes | Path, ...], stays: bool) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError), self._lock:  # the reader finds out that the connection is gone
            for piece in pieces:
                if isinstance(piece, Path):
                    with piece.open("rb") as file:
                        shutil.copyfileobj(file, self._process.stdin)
                else:
                    self._process.stdin.write(piece)
            self._process.stdin.flush()
            if not stays:
                self._process.stdin.close()

    def send(self, word: str) -> None:
        """Send a word after the request; nothing happens where the connection is gone or does not take it."""
        if self._process.stdin is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            pass
        finally:
            self._lock.release()

    def frames(self) -> Iterator[tuple[str, bytes]]:
        """The frames of the answer as they come: a letter and what belongs to it. The last has the letter R."""
        stream = self._process.stdout
        assert stream is not None
        noise = b""
        while line := stream.readline(FRAME_BYTES):
            if line == GREETING:
                break
            noise = (noise + line)[-STDERR_BYTES:]
        else:
            why, code = self.why(noise), self._process.returncode
            if code in (126, 127):  # a shell was reached, which did not find the program
                raise LaunchError(f"a worker needs python3 (3.8 or newer) on the PATH of ssh: {why}", SETUP_FAILED)
            raise DroppedError(why)
        while head := stream.readline(STDERR_BYTES):
            parts = re.fullmatch(rb"([A-Z])(?: ([0-9]{1,8}))?\n", head)
            if parts is None or int(parts[2] or 0) > FRAME_BYTES:
                break  # what has come is not of the agent, or was cut
            kind, size = parts[1].decode(), int(parts[2] or 0)
            data = stream.read(size)
            if len(data) < size:
                break
            yield kind, data
            if kind == "R":
                return
        raise DroppedError(self.why(b""))

    def why(self, noise: bytes) -> str:
        """The last words of ssh, or of the worker's shell."""
        code = self._process.wait()
        self._errors.seek(0, 2)
        self._errors.seek(max(0, self._errors.tell() - STDERR_BYTES))
        words = (noise[-STDERR_BYTES:] + self._errors.read()).decode(errors="replace").strip()
        return (" ".join(words.split()) or "the connection was closed") + f" (exit code {code})"

    def end(self) -> None:
        """End the connection; what runs on the worker goes on."""
        self._process.kill()

    def close(self) -> None:
        """End the connection, and wait for what has served it."""
        self._process.kill()
        self._process.wait()
        self._writer.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):  # what could not be sent any more
                    stream.close()


NEEDED: Final = {
    "facts": ("time", "disk", "busy_ports", "closed", "holders", "small_pages", "program", "versions", "path"),
    "has": ("has",),
    "setup": ("code",),
    "clear": ("running",),
    "status": ("state", "time"),
    "follow": ("state",),
    "ended": ("code", "ended", "reason"),
}
"""The fields of an answer, by the operation, or of a command that has ended."""


def answered(data: bytes, operation: str) -> dict[str, Any]:
    """The last frame of a worker, with its texts as a terminal may have them."""
    place, fix = "the answer of a worker", "Look at what else its ssh or its python3 runs."
    with refused(place, fix, LaunchError):
        answer = parse_json(data, place, dict, fix, LaunchError)
        typed(Answer, {field.name: answer[field.name] for field in dataclasses.fields(Answer) if field.name in answer})
        kind = "ended" if answer.get("state") == "ended" else operation
        needed = ("error",) if "error" in answer else NEEDED.get(kind, ())
        if missing := [name for name in needed if name not in answer]:
            raise ValueError(f"it has no {missing[0]}")
        return {name: printable(value) if isinstance(value, str) else value for name, value in answer.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that has a chip open."""

    pid: int
    command: str
    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The types of what `lockstep.launch.agent` answers, whatever it was asked for."""

    error: str = ""
    state: Literal["absent", "running", "ended", "lost"] = "absent"
    code: int = 0
    ended: float | list[str] = 0.0
    reason: str = ""
    started: float = 0.0
    log_changed: float = 0.0
    time: float = 0.0
    running: list[str] = dataclasses.field(default_factory=list)
    has: bool = False
    disk: dict[str, float] = dataclasses.field(default_factory=dict)
    busy_ports: list[int] = dataclasses.field(default_factory=list)
    closed: list[str] = dataclasses.field(default_factory=list)
    holders: list[Holder] = dataclasses.field(default_factory=list)
    small_pages: bool = False
    program: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    path: str = ""


def call(
    transport: Transport,
    worker: int,
    request: dict[str, Any],
    payload: tuple[bytes | Path, ...] = (),
    on_output: Callable[[bytes], object] | None = None,
) -> dict[str, Any]:
    """Ask the agent on a worker for something, and wait for its answer."""
    connection = Connection(transport, worker, request, payload)
    try:
        for kind, data in connection.frames():
            if kind == "O" and on_output is not None:
                on_output(data)
            if kind == "R":
                result = answered(data, request["op"])
                if "error" in result:
                    name = transport.workers[worker].name
                    raise LaunchError(f"worker {name}: {result['error']}", SETUP_FAILED)
                return result
        raise AssertionError("frames end with R or an error")
    finally:
        connection.close()
