"""Processes on this machine that start and end together, and what they print."""

import collections
import contextlib
import dataclasses
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO

from lockstep.exits import describe_code
from lockstep.launch.agent.supervisor import die_with_parent
from lockstep.launch.backend import Errors
from lockstep.launch.failure import LAST_LINES, Ending, failed_by_themselves, first_failure, tail_to_show
from lockstep.printable import write_to_stdout
from lockstep.redact import Redactor

POLL_S = 0.05  # seconds between two checks of which processes still run
REPORT_S = 3.0
"""Seconds that the other processes have, after one failed, to report what is wrong before they get SIGTERM."""
_CONNECTED = re.compile(
    rb"(?:\[Gloo\] Rank | is connected to \d+ peer ranks\. |Expected number of connected peer ranks is : |\d)+"
)
"""The lines of gloo about connections that it has made, whose pieces threads mix; it has no setting for them, and what
it could not connect is an error."""


@dataclasses.dataclass(eq=False)
class Child:
    """One process of the job, in a process group of its own, and the last lines that it printed."""

    index: int
    process: subprocess.Popen[bytes]
    prefix: str
    log: IO[bytes] | None
    started: float
    redactor: Redactor
    rest: bytes = b""
    last: collections.deque[bytes] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=LAST_LINES))

    @property
    def code(self) -> int:
        """The exit code of the process, which has ended, as a shell has it."""
        return shell_code(self.process.returncode)

    def signal(self, number: int) -> None:
        """Send a signal to the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Job:
    """Processes that start and end together."""

    def __init__(self, grace_s: float, secrets: Collection[str] = ()):
        self.grace_s = grace_s
        self.secrets = secrets
        self.children: list[Child] = []
        self.selector = selectors.DefaultSelector()
        self.received: list[int] = []  # signals to the launcher that are not yet passed on
        self.stopped_by: int | None = None  # the first of them
        self.errors = Errors()
        self.ended: list[Child] = []  # those that have not ended well, in the order of time
        self.failed: Child | None = None
        self.first_failure: float | None = None
        self.terminate_at: float | None = None  # when what still runs after a failure gets SIGTERM
        self.kill_at: float | None = None  # when what still runs gets SIGKILL

    def start(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        inherit: bool,
        prefix: str,
        log: IO[bytes] | None,
    ) -> None:
        """Start one process; with ``inherit`` it writes to the launcher's own terminal."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if inherit else subprocess.PIPE,
            stderr=None if inherit else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        child = Child(index, process, prefix, log, time.monotonic(), Redactor(self.secrets))
        self.children.append(child)
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            self.selector.register(process.stdout, selectors.EVENT_READ, child)

    def wait(self) -> int:
        """Show output until every process has ended; return the job's exit code."""
        while True:
            self._pass_signals_on()
            self._read(POLL_S)
            codes = [child.process.poll() for child in self.children]
            if self.failed is None and self.stopped_by is None:
                self._find_failure(all_ended=None not in codes)
            if None not in codes:
                break
            if self.terminate_at is not None and time.monotonic() > self.terminate_at:
                self._terminate_others()
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                self._signal_all(signal.SIGKILL)
        self._signal_all(signal.SIGKILL)  # what the processes started and left behind
        self._read(0.0)
        for child in self.children:
            self._finish(child)
        return self._code()

    def _find_failure(self, all_ended: bool) -> None:
        """Name the process that failed first, but one that raised before one that ended because of another."""
        for child in self.children:
            if child.process.returncode and child not in self.ended:
                self.ended.append(child)
        if not self.ended:
            return
        for child in self.ended:
            self._drain(child)
        if self.first_failure is None:
            self.first_failure = time.monotonic()
        cause = first_failure(
            [Ending(worker=child.index, code=child.code, at=place) for place, child in enumerate(self.ended)],
            unreachable=False,
            all_ended=all_ended,
            waited_s=time.monotonic() - self.first_failure,
            themselves=failed_by_themselves(self._last_lines()),
        )
        if cause is not None:
            self._fail(self.children[cause.worker])

    def _code(self) -> int:
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.failed is None:
            return 0
        print(f"launch: failed: process {self.failed.index}, {describe(self.failed)}", file=sys.stderr, flush=True)
        return self.failed.code

    def _pass_signals_on(self) -> None:
        while self.received:
            number = self.received.pop(0)
            again, self.stopped_by = self.stopped_by is not None, self.stopped_by or number
            if again:
                self._signal_all(signal.SIGKILL)
                continue
            name = signal.Signals(number).name
            print(f"\nlaunch: {name}, ending {len(self.children)} process(es)", file=sys.stderr, flush=True)
            self._signal_all(number)
            self.kill_at = time.monotonic() + self.grace_s

    def _fail(self, child: Child) -> None:
        """Print which process failed and its last lines; the others get a moment to report what is wrong."""
        self.failed = child
        self._drain(child)
        print(f"launch: process {child.index} failed, {describe(child)}", file=sys.stderr)
        index, lines = tail_to_show(child.index, self._last_lines())
        if lines:
            whose = "its" if index == child.index else f"process {index} failed before, its"
            print(f"launch: {whose} last lines:", file=sys.stderr)
            for line in lines:
                print(f"[{index}] " + line.decode(errors="replace"), file=sys.stderr)
        sys.stderr.flush()
        self.terminate_at = time.monotonic() + min(self.grace_s, REPORT_S)

    def _last_lines(self) -> list[Collection[bytes]]:
        """The last lines of each process that has not ended well."""
        return [() if child.process.returncode == 0 else child.last for child in self.children]

    def _terminate_others(self) -> None:
        """Send SIGTERM to what still runs after a failure."""
        self.terminate_at = None
        others = [other for other in self.children if other.process.poll() is None]
        if others:
            print(f"launch: ending the other {len(others)} process(es)", file=sys.stderr, flush=True)
        for other in others:
            other.signal(signal.SIGTERM)
        self.kill_at = time.monotonic() + min(self.grace_s, 3.0)

    def _signal_all(self, number: int) -> None:
        for child in self.children:
            child.signal(number)

    def _read(self, timeout_s: float) -> None:
        if not self.selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self.selector.select(timeout_s):
            self._drain(key.data, reads=1)

    def _drain(self, child: Child, reads: int = 256) -> None:
        """Read what is in the pipe now, at most ``reads`` times; whole lines are shown, the rest waits."""
        stream = child.process.stdout
        for _ in range(reads):
            if stream is None or stream.closed:
                return
            try:
                data = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.selector.unregister(stream)
                stream.close()
            shown = child.redactor.feed(data) if data else child.redactor.flush()
            *lines, child.rest = (child.rest + shown).split(b"\n")
            for line in lines:
                self._show(child, line)

    def _show(self, child: Child, line: bytes) -> None:
        if (b"[Gloo] Rank " in line or b" peer ranks. Expected number" in line) and _CONNECTED.fullmatch(line):
            return
        child.last.append(line)
        if child.log:
            child.log.write(line + b"\n")
        # An error that stopped every process is said by each of them: one copy is enough at the terminal.
        repeated = self.errors.is_copy(str(child.index), line)
        # After Ctrl-C the leader may still report something; N copies of a stack trace are of no use.
        if not repeated and (self.stopped_by is None or child.index == 0):
            write_to_stdout(lambda: sys.stdout.buffer.write(child.prefix.encode() + line + b"\n"))

    def _finish(self, child: Child) -> None:
        self._drain(child)
        if child.rest:
            self._show(child, child.rest)
        if child.log:
            child.log.close()


@contextlib.contextmanager
def signals_to(receive: Callable[[int], object]) -> Iterator[None]:
    """Pass SIGINT, SIGTERM and SIGHUP to a function while the block runs; under nohup, SIGHUP stays ignored."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: receive(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int) -> None:
    """Raise `KeyboardInterrupt`; after another signal than Ctrl-C once: a terminal that closes sends SIGHUP twice."""
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_IGN)  # also for gcloud, by which a request is withdrawn now
    raise KeyboardInterrupt


def shell_code(returncode: int) -> int:
    """Return the exit code of a process as a shell has it: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def describe(child: Child) -> str:
    """Return how and when a process ended, as text."""
    return f"{describe_code(child.code)}, after {time.monotonic() - child.started:.1f} s"
