"""Run any command in several processes and see how it ends: with a launcher above them, or without."""

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep import launch
from lockstep.testing.pool import POOL
from lockstep.testing.protocol import DIRECTORY, Reference, launch_command


@dataclasses.dataclass(frozen=True)
class Run:
    """The end of a command on all processes.

    Args:
        code: The exit code of the launcher.
        logs: Everything that each process printed, by process number.
    """

    code: int
    output: str
    logs: list[str]


def run_command(
    command: Sequence[str],
    *,
    processes: int = 2,
    devices: int = 2,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Run:
    """Run any command (``["python", "train.py", ...]``) as the processes of a job and return how it ended.

    It is started by ``lockstep launch``, so that a process that fails ends the others. The processes find each other by
    `lockstep.start`, or by the variables ``LOCKSTEP_COORDINATOR_ADDRESS``, ``LOCKSTEP_NUM_PROCESSES`` and
    ``LOCKSTEP_PROCESS_ID``.

    Args:
        cwd: The working directory; None: the present one.

    Raises:
        AssertionError: It outlived ``timeout_s``; the text has every process's log.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-logs-") as directory:
        process = subprocess.Popen(
            [*launch_command(processes, devices, Path(directory)), *command],
            env={**os.environ, **POOL.settings.environment, **(env or {})},
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
    """The end of one process without a launcher.

    Args:
        code: The exit code; minus the signal that killed it.
        seconds: The seconds after the first process of the job had ended.
        at: When, by ``time.monotonic()``, which all processes of a machine share.
    """

    code: int
    seconds: float
    at: float
    log: str


def run_unattended(
    command: Sequence[str], *, processes: int = 2, devices: int = 1, timeout_s: float = 120.0
) -> list[End]:
    """Run a command in processes that no launcher ends when one of them dies, and return how each ended by itself.

    Args:
        command: The program and its arguments; see `function_command`.

    Raises:
        AssertionError: One outlived ``timeout_s``; the text has every process's log.
    """
    options = launch.parse(["--devices_per_process", str(devices), "--processes", str(processes), "--", *command])
    address = f"127.0.0.1:{launch.free_port()}"
    with tempfile.TemporaryDirectory(prefix="lockstep-logs-") as directory:
        files = [Path(directory) / str(index) for index in range(processes)]
        running = []
        for index, file in enumerate(files):
            with file.open("wb") as log:
                base = {**os.environ, **POOL.settings.environment}
                environment = launch.local_environment(base, options, address, index)
                running.append(
                    subprocess.Popen(
                        launch.resolve(command), env=environment, cwd=DIRECTORY, stdout=log, stderr=subprocess.STDOUT
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


def function_command(body: Callable[..., Any], *args: Any) -> list[str]:
    """Return the command of a process that runs ``body(hosts, *args)`` and ends with it, for `run_unattended`.

    Args:
        body: A function of a module.
    """
    setup = POOL.settings.setup
    fields = {
        "reference": vars(Reference.to(body)),
        "arguments": args,
        "setup": None if setup is None else vars(Reference.to(setup)),
    }
    return ["python", "-m", "lockstep.testing.worker", "once", json.dumps(fields)]
