"""Groups of processes that are started once, through infra/launch.py, and run one body after another.

There is at most one shared group per number of processes and devices. It starts when a test first needs it and ends
with the tests. A body that leaves something behind, raises, dies or takes too long ends its group and fails its own
test alone: the next one starts a new group.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from tests.multiprocess.launcher import LAUNCHER, REPOSITORY, cache_environment
from tests.multiprocess.worker import MARK

END_S = 20.0
"""Seconds in which the processes of a group leave when the tests hang up."""

MOST_PROCESSES = 8
"""That wait in shared groups at a time: each holds half a gigabyte."""

_shared: dict[tuple[int, int], "Group"] = {}
"""By processes and devices; the one that was used last comes last."""


def shared(processes: int, devices: int) -> "Group":
    """The running group of this size; started where there is none, and then others that waited longest may end.

    Raises:
        AssertionError: a process of it ended while it waited, or a new one did not start; the text has the logs.
    """
    group = _shared.pop((processes, devices), None)
    if group is not None and not group.running:
        group.end()
        group = None
    if group is None:
        for size in list(_shared):
            if sum(count for count, _ in _shared) + processes > MOST_PROCESSES:
                _shared.pop(size).end()
        group = Group(processes, devices)
    _shared[processes, devices] = group
    return group


def end_all() -> None:
    """End the shared groups.

    Raises:
        AssertionError: one did not end in order; the text has every process's log.
    """
    groups = list(_shared.values())
    _shared.clear()
    for group in groups:
        group.hang_up()
    for group in groups:
        group.end()


class Group:
    """The processes of one job, waiting for bodies.

    Args:
        processes: how many.
        devices: CPU devices of each.
        env: set in every process.
        start_s: seconds in which all must have joined.

    Raises:
        AssertionError: a process failed or ran out of time; the text has every process's log.
    """

    def __init__(self, processes: int, devices: int, env: Mapping[str, str] | None = None, start_s: float = 120.0):
        self._bodies = 0
        self._what = f"the start of {processes} processes"
        self._directory = Path(tempfile.mkdtemp(prefix="lockstep-test-"))
        address = str(self._directory / "line")
        command = [sys.executable, str(LAUNCHER), "--backend", "local", "--processes", str(processes)]
        command += ["--devices_per_process", str(devices), "--prefix", "always", "--log_dir", str(self._directory)]
        command += ["--grace_s", "3", "--", "python", "-m", "tests.multiprocess.worker", "serve", address]
        with socket.socket(socket.AF_UNIX) as listener, open(self._directory / "launcher.log", "wb") as log:
            listener.bind(address)
            listener.listen(processes)
            listener.settimeout(0.1)
            environment = {**os.environ, **cache_environment(), **(env or {})}
            self._launcher = subprocess.Popen(
                command, env=environment, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT
            )
            self._lines: dict[int, Connection] = {}
            deadline = time.monotonic() + start_s
            while len(self._lines) < processes:
                if self._launcher.poll() is not None:
                    self._fail("a process failed")
                if time.monotonic() > deadline:
                    self._fail(f"not done within {start_s:g} s")
                try:
                    accepted, _ = listener.accept()
                except TimeoutError:
                    continue
                accepted.setblocking(True)
                line = Connection(accepted.detach())
                self._lines[line.recv()] = line

    @property
    def running(self) -> bool:
        """Whether bodies can be run."""
        return self._launcher.poll() is None and self._directory.exists()

    def run(
        self, body: Callable[..., Any], args: Sequence[Any], timeout_s: float, *, leaves: bool = False
    ) -> list[Any]:
        """Run ``body(hosts, *args)`` in every process and return what each one returned, by process number.

        Args:
            body: a module-level function.
            args: JSON values.
            timeout_s: seconds that it may take.
            leaves: whether it may leave things behind.

        Raises:
            AssertionError: a process failed or ran out of time, or left something behind. The group has then ended.
        """
        self._bodies += 1
        self._what = body.__name__
        request = (self._bodies, body.__module__, body.__name__, json.dumps(list(args)))
        deadline = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        try:
            for line in self._lines.values():
                line.send(request)
            waiting = {line: index for index, line in self._lines.items()}
            while waiting:
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._fail(f"not done within {timeout_s:g} s")
                for line in ready:
                    answers[waiting.pop(line)] = line.recv()
        except (EOFError, OSError):
            self._fail("a process failed", patience_s=END_S)
        texts = [f"process {index}: {text}" for index, one in sorted(answers.items()) for text in one["left"]]
        if len({one["ledger"] for one in answers.values()}) > 1:
            texts.append("the processes have not launched the same programs")
        if texts and not leaves:
            self._fail("left behind:\n  " + "\n  ".join(texts))
        return [json.loads(answers[index]["result"]) for index in range(len(answers))]

    def hang_up(self) -> None:
        """Have the processes leave the job in order."""
        for line in self._lines.values():
            line.close()

    def end(self) -> None:
        """Hang up and wait until the processes have left the job; does nothing where it has ended.

        Raises:
            AssertionError: they did not, or not in time; the text has every process's log.
        """
        if not self._directory.exists():
            return
        self._what = f"the end of the job, after {self._what}"
        self.hang_up()
        try:
            code = self._launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            self._fail(f"not done within {END_S:g} s")
        if code != 0:
            self._fail("a process failed")
        shutil.rmtree(self._directory)

    def _fail(self, why: str, patience_s: float = 0.0) -> NoReturn:
        """End the group, at the latest after ``patience_s``, and say why, with every process's log of this body."""
        try:
            self._launcher.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._launcher.send_signal(signal.SIGTERM)
            try:
                self._launcher.wait(10)
            except subprocess.TimeoutExpired:
                self._launcher.kill()  # the kernel then kills the processes: launch.die_with_parent
                self._launcher.wait()
        self.hang_up()
        launcher = (self._directory / "launcher.log").read_text(errors="replace")
        files = sorted(self._directory.glob("process-*.log"))
        logs = "\n".join(f"---- {file.stem}\n{self._part(file.read_text(errors='replace'))}" for file in files)
        own = "\n".join(line for line in launcher.splitlines() if line.startswith("launch: "))
        shutil.rmtree(self._directory)
        raise AssertionError(f"{self._what}: {why}; the launcher ended with {self._launcher.returncode}\n{logs}\n{own}")

    def _part(self, log: str) -> str:
        """What a process printed since the present body began."""
        return log.rpartition(f"{MARK}{self._bodies}\n")[2]
