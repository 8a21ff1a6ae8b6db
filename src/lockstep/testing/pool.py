"""Processes of tests: functions in groups of them that are started once, and commands, with a launcher or without.

There is at most one shared group per number of processes and devices. It starts when a test first needs it and ends
with the tests. A function that leaves something behind, raises, dies or takes too long ends its group and fails its own
test alone: the next one starts a new group.
"""

import atexit
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
from lockstep.config_fields import check_fields
from lockstep.files import in_place
from lockstep.testing.group import Group
from lockstep.testing.protocol import DIRECTORY, Arguments, Placeholder, Reference, launch_command


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Settings of the processes that a pool starts.

    Args:
        environment: What is set in every process, beside the variables of the test run.
        setup: A function of a module that every process calls before it joins its job: what must be set before JAX has
            devices. None: nothing.
        most_processes: How many processes may wait for tests at a time, each with half a gigabyte or so; when more are
            needed, the groups that waited longest end first.
        patience: Factor of every time limit, those that tests pass included, for machines that may be slow.

    Example:
        >>> from lockstep.testing import PoolSettings
        >>> PoolSettings(most_processes=4).most_processes
        4
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    setup: Callable[[], object] | None = None
    most_processes: int = 8
    patience: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


class Pool:
    """The groups of a test run."""

    def __init__(self, settings: PoolSettings | None = None):
        self.settings = settings or PoolSettings()
        self._shared: dict[tuple[int, int], Group] = {}  # the one that was used last comes last

    def shared(self, processes: int, devices: int) -> Group:
        """Return the running group of this size, or start it, for which others that waited longest may end."""
        group = self._shared.pop((processes, devices), None)
        if group is not None and not group.running:
            group.end()
            group = None
        if group is None:
            for size in list(self._shared):
                if sum(count for count, _ in self._shared) + processes > self.settings.most_processes:
                    self._shared.pop(size).end()
            group = self.start(processes, devices)
        self._shared[processes, devices] = group
        return group

    def start(self, processes: int, devices: int, env: Mapping[str, str] | None = None) -> Group:
        """Start a group that is not shared."""
        settings = self.settings
        return Group(processes, devices, {**settings.environment, **(env or {})}, settings.setup, settings.patience)

    def call(
        self,
        function: Reference,
        arguments: Arguments,
        *,
        processes: int,
        devices: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        own: str = "",
        name: str = "",
    ) -> list[Any]:
        """Call a function in every process of a group; see `run_processes`, and `Group.call` for the rest.

        Args:
            env: What is set in every process, which then serve this function alone.
            own: Why the function needs processes that serve it alone; empty where it does not.
            name: What errors call it; empty: its name.
        """
        if not own and not env:
            return self.shared(processes, devices).call(function, arguments, timeout_s=timeout_s, name=name)
        group = self.start(processes, devices, env)
        results = group.call(function, arguments, timeout_s=timeout_s, name=name, leaves=True)
        group.end()
        return results

    def end(self) -> None:
        """End the shared groups."""
        groups = list(self._shared.values())
        self._shared.clear()
        for group in groups:
            group.hang_up()
        for group in groups:
            group.end()


POOL = Pool()  # the pool of this test run
atexit.register(POOL.end)  # for a script; pytest's plugin ends it earlier


def configure(settings: PoolSettings) -> None:
    """Set how the processes of this test run are started, from a ``conftest.py``.

    Args:
        settings: The settings, for groups that are started from now on.

    Example:
        >>> from lockstep.testing import PoolSettings, configure
        >>> configure(PoolSettings(environment={"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}))
    """
    POOL.settings = settings


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
    """Run ``body(hosts, *args)`` in every process of a job and return what each one returned, by process number.

    Args:
        body: A function of a module. It gets the process's `lockstep.hosts.Hosts`, already started, and ``args``.
        devices: The CPU devices of each, as JAX sees them.
        env: What is set in every process, which then serve this body alone.
        own: Why the body needs processes that serve it alone; empty where it does not.

    Returns:
        JSON values: numbers, text, lists and dictionaries; NumPy arrays come as lists, and keys as text.

    Raises:
        AssertionError: It failed in a process or ran out of time, or it left something behind in processes that serve
            others; the text has every process's log.

    Example:
        >>> from lockstep.testing import run_processes
        >>> import inspect
        >>> run_processes(inspect.isclass, processes=2, devices=1)  # a function of yours, which gets the hosts
        [False, False]
    """
    return POOL.call(
        Reference.to(body),
        ((Placeholder.HOSTS, *args), {}),
        processes=processes,
        devices=devices,
        timeout_s=timeout_s,
        env=env,
        own=own,
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """The end of a command on all processes."""

    code: int  # the exit code of the launcher
    output: str
    logs: list[str]  # everything that each process printed, by process number


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
    """
    limit_s = timeout_s * POOL.settings.patience
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
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                output, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()  # the kernel then kills the workers: launch.die_with_parent
                output, _ = process.communicate()
            raise AssertionError(f"{' '.join(command)} did not end within {limit_s:g} s\n{output}") from None
        finally:
            process.kill()
        files = [Path(directory) / f"process-{i}.log" for i in range(processes)]
        logs = [file.read_text(errors="replace") if file.exists() else "" for file in files]
        return Run(process.returncode, output, logs)


@dataclasses.dataclass(frozen=True)
class End:
    """The end of one process without a launcher."""

    code: int  # the exit code; minus the signal that killed it
    seconds: float  # seconds after the first process of the job had ended
    at: float  # when, by `time.monotonic()`, which all processes of a machine share
    log: str


def run_unattended(
    command: Sequence[str], *, processes: int = 2, devices: int = 1, timeout_s: float = 120.0
) -> list[End]:
    """Run a command in processes that no launcher ends when one of them dies, and return how each ended by itself."""
    limit_s = timeout_s * POOL.settings.patience
    options = launch.parse(["--devices_per_process", str(devices), "--processes", str(processes), "--", *command])
    address = f"127.0.0.1:{launch.free_port()}"
    with tempfile.TemporaryDirectory(prefix="lockstep-logs-") as directory:
        files = [Path(directory) / str(index) for index in range(processes)]
        running = []
        for index, file in enumerate(files):
            with open(file, "wb", opener=in_place) as log:
                base = {**os.environ, **POOL.settings.environment}
                environment = launch.local_environment(base, options, address, index)
                running.append(
                    subprocess.Popen(
                        launch.resolve(command), env=environment, cwd=DIRECTORY, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        ends: dict[int, float] = {}
        try:
            deadline = time.monotonic() + limit_s
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
            raise AssertionError(f"{' '.join(command)}: processes {left} did not end within {limit_s:g} s\n{text}")
        first = min(ends.values())
        return [End(process.returncode, ends[i] - first, ends[i], logs[i]) for i, process in enumerate(running)]


def function_command(body: Callable[..., Any], *args: Any) -> list[str]:
    """Return the command of a process that runs ``body(hosts, *args)`` and ends with it, for `run_unattended`."""
    setup = POOL.settings.setup
    fields = {
        "reference": vars(Reference.to(body)),
        "arguments": args,
        "setup": None if setup is None else vars(Reference.to(setup)),
        "patience": POOL.settings.patience,
    }
    return ["python", "-m", "lockstep.testing.worker", "once", json.dumps(fields)]
