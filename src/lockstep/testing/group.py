"""The processes of one job, which run one function after another."""

import concurrent.futures
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from lockstep.files import in_place
from lockstep.testing.protocol import (
    DIRECTORY,
    MARK,
    Arguments,
    LeftoverCheck,
    Leftovers,
    Outcome,
    Placeholder,
    Reference,
    Request,
    launch_command,
)

START_S = 120.0  # seconds in which all processes of a group must have joined
END_S = 20.0  # seconds in which the processes of a group leave when the test run hangs up, or when one of them has died
LOOK_S = 30.0  # seconds in which every process says what a function has left behind
OTHERS_S = 2.0  # seconds in which a function that failed in one process may end in the others too
STACK_S = 0.3  # seconds in which a process prints where it is
SOCKET_BYTES = 100  # bytes that the path of a Unix socket may have; macOS allows 103, Linux 107


SOCKET = "line"


def _make_directory() -> Path:
    """Make a directory; where TMPDIR is too long for a socket in it, in /tmp."""
    directory = Path(tempfile.mkdtemp(prefix="lockstep-test-"))
    if len(os.fsencode(directory / SOCKET)) > SOCKET_BYTES:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="lockstep-test-", dir="/tmp"))
    return directory


class Group:
    """The processes of one job, waiting for functions.

    Raises:
        AssertionError: A process failed or ran out of time; the text has every process's log.
    """

    def __init__(
        self,
        processes: int,
        devices: int,
        environment: Mapping[str, str] | None = None,
        setup: Callable[[], object] | None = None,
        patience: float = 1.0,
    ):
        self._count = 0
        self._patience = patience
        self._what = f"the start of {processes} processes"
        self._directory = _make_directory()
        self._lines: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        address = str(self._directory / SOCKET)
        first = None if setup is None else vars(Reference.to(setup))
        command = launch_command(processes, devices, self._directory)
        arguments = {"path": sys.path, "setup": first, "patience": patience}
        command += ["python", "-m", "lockstep.testing.worker", address, json.dumps(arguments)]
        with (
            socket.socket(socket.AF_UNIX) as listener,
            open(self._directory / "launcher.log", "wb", opener=in_place) as log,
        ):
            listener.bind(address)
            listener.listen(processes)
            listener.settimeout(0.1)
            self._launcher = subprocess.Popen(
                command, env={**os.environ, **(environment or {})}, cwd=DIRECTORY, stdout=log, stderr=subprocess.STDOUT
            )
            deadline = time.monotonic() + START_S * patience
            while len(self._lines) < processes:
                if self._launcher.poll() is not None:
                    self._fail("a process failed")
                if time.monotonic() > deadline:
                    self._fail(f"not done within {START_S * patience:g} s")
                with contextlib.suppress(TimeoutError, EOFError):  # nobody yet; one that died at once
                    accepted, _ = listener.accept()
                    accepted.setblocking(True)
                    line = Connection(accepted.detach())
                    hello = line.recv()
                    self._lines[hello.index], self._pids[hello.index] = line, hello.pid

    @property
    def running(self) -> bool:
        """Whether functions can be run."""
        return self._launcher.poll() is None and self._directory.exists()

    def run(self, body: Callable[..., Any], args: Sequence[Any] = (), *, timeout_s: float = 120.0) -> list[Any]:
        """Run ``body(hosts, *args)`` in every process and return what each one returned; see `call`."""
        return self.call(Reference.to(body), ((Placeholder.HOSTS, *args), {}), timeout_s=timeout_s)

    def call(
        self, function: Reference, arguments: Arguments, *, timeout_s: float, name: str = "", leaves: bool = False
    ) -> list[Any]:
        """Call a function in every process and return what each call returned, by process number.

        Args:
            arguments: What it gets, in order and by name: what can be pickled, or a `Placeholder`.
            name: What errors call it; empty: its name.
            leaves: Whether it may leave things behind, because nothing else runs in these processes.

        Raises:
            AssertionError: It failed in a process, ran out of time, or left something behind. The group has then ended.
            pytest.skip.Exception: Every process skipped it.
        """
        self._count += 1
        self._what = name or function.name
        request = Request(number=self._count, function=function, path=list(sys.path), arguments=pickle.dumps(arguments))
        outcomes = self._outcomes(request, timeout_s * self._patience)
        if not leaves:
            self._check_nothing_is_left()
        reasons = [outcome.skipped for outcome in outcomes if outcome.skipped is not None]
        if reasons:
            import pytest

            pytest.skip(reasons[0])
        return [json.loads(outcome.result or "null") for outcome in outcomes]

    def _outcomes(self, request: Request, timeout_s: float) -> list[Outcome]:
        self._send(request)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while waiting := self._lines.keys() - outcomes.keys():
            arrived = self._receive(waiting, deadline)
            if not arrived:
                break
            outcomes |= arrived
            if any(outcome.failed is not None for outcome in arrived.values()):
                deadline = min(deadline, time.monotonic() + OTHERS_S * self._patience)
        one_kind = len({outcome.skipped for outcome in outcomes.values()}) == 1
        if waiting or not one_kind or any(outcome.failed is not None for outcome in outcomes.values()):
            self._fail_by_process(outcomes, timeout_s)
        return [outcomes[index] for index in sorted(outcomes)]

    def _fail_by_process(self, outcomes: Mapping[int, Outcome], timeout_s: float) -> NoReturn:
        """End the group, and raise with what became of the function in each process."""
        waiting = self._lines.keys() - outcomes.keys()
        for index in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[index], signal.SIGUSR1)  # lockstep.testing.worker prints its stack then
        time.sleep(STACK_S if waiting else 0.0)
        ends = {index: str(outcomes.get(index, "not done; its log ends with its stack")) for index in self._lines}
        lines = [f"process {index}: {end}" for index, end in sorted(ends.items())]
        if len(set(ends.values())) == 1:
            lines = [f"every process {ends[0]}"] if not waiting else ["no process is done; each log ends with a stack"]
        failed = any(outcome.failed is not None for outcome in outcomes.values())
        why = "failed" if failed or not waiting else f"not done within {timeout_s:g} s"
        self._fail("\n  ".join([f"{why}:", *lines]), in_order=not waiting)

    def _check_nothing_is_left(self) -> None:
        self._send(LeftoverCheck())
        leftovers: dict[int, Leftovers] = {}
        deadline = time.monotonic() + LOOK_S * self._patience
        while waiting := self._lines.keys() - leftovers.keys():
            arrived = self._receive(waiting, deadline)
            if not arrived:
                self._fail(f"what it left behind was not found within {LOOK_S * self._patience:g} s")
            leftovers |= arrived
        texts = [f"process {index}: {text}" for index, left in sorted(leftovers.items()) for text in left.lines]
        if len({left.ledger for left in leftovers.values()}) > 1:
            texts.append("the processes have not launched the same programs")
        if texts:
            self._fail("left behind:\n  " + "\n  ".join(texts), in_order=True)

    def _send(self, message: object) -> None:
        try:
            for line in self._lines.values():
                line.send(message)
        except OSError:
            self._fail("a process failed", grace_s=END_S * self._patience)

    def _receive(self, processes: Collection[int], deadline: float) -> dict[int, Any]:
        """Wait until at least one of some processes has answered; return the answers, none where it is too late."""
        lines = {self._lines[index]: index for index in processes}
        try:
            ready = wait(list(lines), max(0.0, deadline - time.monotonic()))
            return {lines[line]: line.recv() for line in ready if isinstance(line, Connection)}
        except (EOFError, OSError):
            self._fail("a process failed", grace_s=END_S * self._patience)

    def hang_up(self) -> None:
        """Have the processes leave the job in order."""
        for line in self._lines.values():
            line.close()

    def end(self) -> None:
        """Hang up and wait until the processes have left the job; does nothing where it has ended."""
        if not self._directory.exists():
            return
        self._what = f"the end of the job, after {self._what}"
        self.hang_up()
        try:
            code = self._launcher.wait(END_S * self._patience)
        except subprocess.TimeoutExpired:
            self._fail(f"not done within {END_S * self._patience:g} s")
        if code != 0:
            self._fail("a process failed")
        shutil.rmtree(self._directory)

    def _fail(self, why: str, *, grace_s: float = 0.0, in_order: bool = False) -> NoReturn:
        """End the group, and raise with the reason and every process's log of the present function.

        Args:
            grace_s: The seconds in which the processes may end by themselves.
            in_order: Whether all of them wait for the next function, so that they can leave in order.
        """
        if in_order:
            self.hang_up()
        try:
            self._launcher.wait(END_S * self._patience / 4 if in_order else grace_s)
        except subprocess.TimeoutExpired:
            self._launcher.send_signal(signal.SIGTERM)
            try:
                self._launcher.wait(10)
            except subprocess.TimeoutExpired:
                self._launcher.kill()  # the kernel then kills the processes: launch.die_with_parent
                self._launcher.wait()
        self.hang_up()
        raise AssertionError(f"{self._what}: {why}\n{self._logs()}")

    def _logs(self) -> str:
        """Return what the processes printed of the present function and the launcher's own lines; delete the files."""
        texts = []
        for file in sorted(self._directory.glob("process-*.log")):
            log = file.read_text(errors="replace").rpartition(f"{MARK}{self._count}\n")[2]
            texts.append(f"---- {file.stem}\n{log}")
        launcher = (self._directory / "launcher.log").read_text(errors="replace")
        own = [line for line in launcher.splitlines() if line.startswith("launch: ")]
        if self._launcher.returncode:
            own.append(f"launch: ended with {self._launcher.returncode}")
        shutil.rmtree(self._directory)
        return "\n".join([*texts, *own])


def run_threads(body: Callable[..., Any], count: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run ``body(hosts, *args)`` in threads of this process, each of them one "process" of a job without devices.

    They share the in-memory twin of the coordination service, so it is for what hosts say to each other.

    Args:
        body: Any callable; it gets a `lockstep.hosts.Hosts` and ``args``.
        timeout_s: The seconds that a wait of the `Hosts` may last.

    Raises:
        BaseException: The first error of a body.
    """
    import jax

    from lockstep.hosts import Hosts, MemoryClient

    # JAX has one guard for the whole process, and each of these threads stands for a process with a guard of its own.
    unguarded = unittest.mock.patch.object(jax, "thread_guard", lambda _: contextlib.nullcontext())
    with unguarded, concurrent.futures.ThreadPoolExecutor(count) as pool:
        hosts = [Hosts(client, timeout_s) for client in MemoryClient.hub(count)]
        futures = [pool.submit(body, own_hosts, *args) for own_hosts in hosts]
        return [future.result() for future in futures]
