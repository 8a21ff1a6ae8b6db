"""Run a function of a test module in several real processes, through infra/launch.py.

In a test module::

    from tests.multiprocess.harness import run_processes

    def body_sum(hosts, scale):                 # runs in every process; module level, positional JSON arguments
        import jax
        ...
        return {"loss": 1.5}                    # JSON; None is fine

    def test_sum():
        results = run_processes(body_sum, processes=2, devices=2, args=(3,))
        assert results[0] == results[1]         # what each process returned, by process number

The body gets the job's ``lockstep.hosts.Hosts`` (already started, inside a barrier before and after) and then ``args``.
JAX sees ``devices`` CPU devices per process. Programs are cached on disk between processes and runs.
The processes serve other tests too (tests/multiprocess/pool.py): what a body leaves behind in them fails its test.
``run_threads`` runs a body that needs no devices between threads of the test, in milliseconds.
When a process raises, dies or outlives ``timeout_s``, all are ended and the error holds every process's log.
"""

import concurrent.futures
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep import launch
from lockstep.hosts import Hosts, MemoryClient
from tests.multiprocess import pool
from tests.multiprocess.launcher import LAUNCHER, REPOSITORY, cache_environment


@dataclasses.dataclass(frozen=True)
class Run:
    """How a command ended on all processes.

    Args:
        code: exit code of the launcher.
        output: everything the launcher printed.
        logs: everything each process printed, by process number.
    """

    code: int
    output: str
    logs: list[str]


def run_processes(
    body: Callable[..., Any],
    *,
    processes: int = 2,
    devices: int = 2,
    timeout_s: float = 120.0,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    own: str = "",
) -> list[Any]:
    """Run ``body(hosts, *args)`` in every process and return what each one returned, by process number.

    Args:
        body: a module-level function.
        processes: how many.
        devices: CPU devices of each.
        timeout_s: seconds after which all are killed.
        args: JSON values.
        env: set in every process, which then serve this body alone.
        own: why the body needs processes that serve it alone; empty where it does not.

    Raises:
        AssertionError: a process failed or ran out of time, or the body left something behind in processes that serve
            others; the text has every process's log.
    """
    if not own and not env:
        return pool.shared(processes, devices).run(body, args, timeout_s)
    group = pool.Group(processes, devices, env)
    results = group.run(body, args, timeout_s, leaves=True)
    group.end()
    return results


def run_command(
    command: Sequence[str],
    *,
    processes: int = 2,
    devices: int = 2,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Run:
    """Run any command (``["lockstep", "train-lm", ...]``) through the launcher and return how it ended.

    Raises:
        AssertionError: it outlived ``timeout_s``; the text has every process's log.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-logs-") as directory:
        launcher = [sys.executable, str(LAUNCHER), "--backend", "local", "--processes", str(processes)]
        launcher += ["--devices_per_process", str(devices), "--prefix", "always", "--log_dir", directory]
        process = subprocess.Popen(
            [*launcher, "--grace_s", "3", "--", *command],
            env={**os.environ, **cache_environment(), **(env or {})},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                output, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()  # the kernel then kills the workers: launch.die_with_parent
                output, _ = process.communicate()
            raise AssertionError(f"{' '.join(command)} did not end within {timeout_s:g} s\n{output}") from None
        finally:
            process.kill()
        files = [Path(directory) / f"process-{i}.log" for i in range(processes)]
        logs = [file.read_text(errors="replace") if file.exists() else "" for file in files]
        return Run(process.returncode, output, logs)


@dataclasses.dataclass(frozen=True)
class End:
    """How one process ended that nobody stood above.

    Args:
        code: exit code; minus the signal that killed it.
        seconds: after the first process of the job had ended.
        at: when, by ``time.monotonic()``, which all processes of a machine share.
        log: everything it printed.
    """

    code: int
    seconds: float
    at: float
    log: str


def run_unattended(
    command: Sequence[str], *, processes: int = 2, devices: int = 1, timeout_s: float = 120.0
) -> list[End]:
    """Run a command in processes that no launcher ends when one of them dies, and return how each ended by itself.

    Raises:
        AssertionError: one outlived ``timeout_s``; the text has every process's log.
    """
    options = launch.parse(["--devices_per_process", str(devices), "--processes", str(processes), "--", *command])
    address = f"127.0.0.1:{launch.free_port()}"
    with tempfile.TemporaryDirectory(prefix="lockstep-logs-") as directory:
        files = [Path(directory) / str(index) for index in range(processes)]
        running = []
        for index, file in enumerate(files):
            with file.open("wb") as log:
                base = {**os.environ, **cache_environment()}
                environment = launch.local_environment(base, options, address, index)
                running.append(
                    subprocess.Popen(
                        launch.resolve(command), env=environment, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        ends: dict[int, float] = {}
        try:
            deadline = time.monotonic() + timeout_s
            while len(ends) < processes and time.monotonic() < deadline:
                for index, process in enumerate(running):
                    if index not in ends and process.poll() is not None:
                        ends[index] = time.monotonic()
                time.sleep(0.02)
        finally:
            for process in running:
                process.kill()
                process.wait()
        logs = [file.read_text(errors="replace") for file in files]
        if len(ends) < processes:
            text = "\n".join(f"---- process {index}\n{log}" for index, log in enumerate(logs))
            left = [index for index in range(processes) if index not in ends]
            raise AssertionError(f"{' '.join(command)}: processes {left} did not end within {timeout_s:g} s\n{text}")
        first = min(ends.values())
        return [End(process.returncode, ends[i] - first, ends[i], logs[i]) for i, process in enumerate(running)]


def run_threads(body: Callable[..., Any], count: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """The same between threads of this process and the in-memory client: host logic without processes or devices.

    Args:
        body: gets a ``Hosts`` and ``args``.
        count: how many threads, each of them one "process".
        args: handed on.
        timeout_s: of the ``Hosts``.

    Returns:
        What each one returned, by number.

    Raises:
        BaseException: the first error of a body.
    """
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        hosts = [Hosts(client, timeout_s) for client in MemoryClient.hub(count)]
        futures = [pool.submit(body, one, *args) for one in hosts]
        return [future.result() for future in futures]


def cached[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Like ``functools.cache``, errors too: what fails for one test does not take its time for all others again."""

    @functools.cache
    def outcome(*args: Any, **kwargs: Any) -> tuple[Any, BaseException | None]:
        try:
            return function(*args, **kwargs), None
        except Exception as error:
            return None, error

    def again(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result, error = outcome(*args, **kwargs)
        if error is not None:
            raise error
        return result

    return again
