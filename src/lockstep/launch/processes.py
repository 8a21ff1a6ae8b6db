"""Processes on this machine that start and end together, and what they print."""

import contextlib
import dataclasses
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from lockstep.launch.agent.supervisor import die_with_parent
from lockstep.launch.backend import Console
from lockstep.launch.failure import Ending
from lockstep.launch.job_loop import REPORT_S, JobLoop
from lockstep.redact import Redactor

_CONNECTED = re.compile(
    rb"(?:\[Gloo\] Rank | is connected to \d+ peer ranks\. |Expected number of connected peer ranks is : |\d)+"
)
"""The lines of gloo about connections that it has made, whose pieces threads mix; it has no setting for them, and what
it could not connect is an error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process of a job."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: IO[bytes] | None = None  # the file that its lines are written to
    inherits: bool = False  # whether it writes to the launcher's own terminal


class LocalJob(JobLoop):
    """Processes of this machine."""

    others_s = REPORT_S

    def __init__(
        self, specs: Sequence[ProcessSpec], console: Console, grace_s: float, secrets: Collection[str] = ()
    ) -> None:
        super().__init__([f"process {index}" for index in range(len(specs))], console, grace_s)
        self._specs = specs
        self._redactors = [Redactor(secrets) for _ in specs]
        self._children: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()

    def start(self) -> None:
        for index, spec in enumerate(self._specs):
            child = subprocess.Popen(
                spec.command,
                env=spec.environment,
                stdin=subprocess.DEVNULL,
                stdout=None if spec.inherits else subprocess.PIPE,
                stderr=None if spec.inherits else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            self._children.append(child)
            if child.stdout is not None:
                os.set_blocking(child.stdout.fileno(), False)
                self._selector.register(child.stdout, selectors.EVENT_READ, index)

    def listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            self._read(key.data, reads=1)
        for index in self.running:
            if (code := self._children[index].poll()) is not None:
                self._read(index)
                self.end(Ending(worker=index, code=shell_code(code), at=time.monotonic()))

    def signal(self, processes: Collection[int], number: int) -> None:
        for index in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._children[index].pid, number)

    def close(self) -> None:
        started = range(len(self._children))
        self.signal(started, signal.SIGKILL)  # what the processes started and left behind
        for index in started:
            self._read(index)
            self.lines[index].end()
        for spec in self._specs:
            if spec.log is not None:
                spec.log.close()

    def show(self, index: int, line: bytes) -> None:
        """As the base class does, and into the log; nothing of what gloo says of its connections."""
        if (b"[Gloo] Rank " in line or b" peer ranks. Expected number" in line) and _CONNECTED.fullmatch(line):
            return
        if (log := self._specs[index].log) is not None:
            log.write(line + b"\n")
        super().show(index, line)

    def _read(self, index: int, reads: int = 256) -> None:
        """Read what is in the pipe of a process now, at most ``reads`` times."""
        stream, redactor = self._children[index].stdout, self._redactors[index]
        for _ in range(reads):
            if stream is None or stream.closed:
                return
            try:
                data = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(stream)
                stream.close()
            self.lines[index].feed(redactor.feed(data) if data else redactor.flush())


def shell_code(returncode: int) -> int:
    """Return the exit code of a process as a shell has it: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode
