"""Connections to a worker: the agent goes over each with a request and answers in frames; a follower keeps one up."""

import contextlib
import dataclasses
import functools
import json
import queue
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
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
        said = (noise[-STDERR_BYTES:] + self._errors.read()).decode(errors="replace").strip()
        return (" ".join(said.split()) or "the connection was closed") + f" (exit code {code})"

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
        found = parse_json(data, place, dict, fix, LaunchError)
        typed(Answer, {each.name: found[each.name] for each in dataclasses.fields(Answer) if each.name in found})
        kind = "ended" if found.get("state") == "ended" else operation
        wanted = ("error",) if "error" in found else NEEDED.get(kind, ())
        if missing := [name for name in wanted if name not in found]:
            raise ValueError(f"it has no {missing[0]}")
        return {name: printable(value) if isinstance(value, str) else value for name, value in found.items()}


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


FIRST_SIGN_S = 60.0  # seconds that a connection may take to come about
SILENT_S = 30.0  # seconds without a sign of life (one comes every 2) after which a connection is given up and made anew
RENEW_S = 5.0  # seconds between two signs of life of the launcher at most; four of them within a lease
REPEAT_S = 1.0  # seconds between two requests to end, until it has ended
WAITING_EVENTS = 256  # events, each with at most 64 KiB of output, that may wait to be taken
DELAYS_S = (0.2, 5.0)  # seconds between two connections, at first and at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a follower has learnt."""

    worker: int
    kind: str  # `connected`, `started`, `output`, `dropped` or `result`
    data: bytes = b""
    text: str = ""  # why the connection dropped
    result: dict[str, Any] = dataclasses.field(default_factory=dict)  # how the command ended (agent.main.look)


class Follower(threading.Thread):
    """Follows an attempt on one worker until it has ended there."""

    def __init__(
        self,
        transport: Transport,
        worker: int,
        request: dict[str, Any],
        start: dict[str, Any] | None,
        offset: int,
        events: "queue.Queue[Event]",
    ) -> None:
        super().__init__(name=f"worker-{worker}", daemon=True)
        self.worker = worker
        self.connected = False
        self.away_since = time.monotonic()  # since when it is not connected
        self.started = start is None
        self.wanted = ""  # what the command is asked for: stop, kill
        self._transport, self._request, self._start, self._offset = transport, request, start, offset
        self._events = events
        self._connection: Connection | None = None
        self._sign = self._renewed = self._repeated = time.monotonic()
        self._finished = threading.Event()

    def run(self) -> None:
        """Connect, again and again, until the command has ended or nobody wants to know any more."""
        delay = DELAYS_S[0]
        while not self._finished.is_set():
            try:
                self._follow()
                return
            except DroppedError as error:
                if self.connected:
                    self.connected, self.away_since, delay = False, time.monotonic(), DELAYS_S[0]
                self._publish("dropped", text=str(error))
            except LaunchError as error:
                self._publish("result", result={"error": str(error)})
                return
            self._finished.wait(delay)
            delay = min(2 * delay, DELAYS_S[1])

    def _follow(self) -> None:
        start = None if self.started else self._start
        request = {**self._request, "op": "follow", "start": start, "offset": self._offset, "wait": True}
        self._sign = time.monotonic()
        connection = self._connection = Connection(self._transport, self.worker, request, stays=True)
        if self._finished.is_set():
            connection.end()  # `finish` came too early to see it
        try:
            for kind, data in connection.frames():
                self._sign = time.monotonic()
                if not self.connected:
                    self.connected = True
                    self._publish("connected")
                if kind == "S" and not self.started:
                    self.started = True
                    self._publish("started")
                elif kind == "O":
                    self._offset += len(data)
                    self._publish("output", data=data)
                elif kind == "R":
                    self._publish("result", result=answered(data, "follow"))
        finally:
            self._connection = None
            connection.close()

    def _publish(self, kind: str, data: bytes = b"", text: str = "", result: dict[str, Any] | None = None) -> None:
        event = Event(worker=self.worker, kind=kind, data=data, text=text, result=result or {})
        while not self._finished.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=0.2)  # who prints faster than can be shown is slowed down
                return

    def tick(self, lease_s: float | None = None) -> None:
        """Give signs of life, repeat what is wanted, and give up a connection that has none; call it often.

        Args:
            lease_s: Seconds after which the worker stops the command without them; None: it does not.
        """
        now, connection = time.monotonic(), self._connection
        if connection is None:
            return
        if now - self._sign > (SILENT_S if self.connected else FIRST_SIGN_S):
            connection.end()
        if self.connected and lease_s is not None and now - self._renewed > min(RENEW_S, lease_s / 4):
            self._renewed = now
            connection.send("renew")
        if self.connected and self.wanted and now - self._repeated > REPEAT_S:
            self._repeated = now
            connection.send(self.wanted)

    def ask(self, word: str) -> None:
        """Have the command ended: ``stop`` or ``kill``."""
        self.wanted, self._repeated = word, 0.0
        self.tick()

    def finish(self) -> None:
        """End the connection; the command goes on."""
        self._finished.set()
        connection = self._connection
        if connection is not None:
            connection.end()
