#!/usr/bin/env python3
"""Start one command on every process of a job, show what they print, and end them together.

    python infra/launch.py --backend local --processes 2 --devices_per_process 2 -- lockstep train-lm --config_path X

Standard library only: it runs with any Python >= 3.12, before anything is installed. Where the processes run is a
`Backend`: a class with a row in ``BACKENDS``. ``local`` simulates a pod as CPU processes on one machine.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

ERROR = b"error: "
"""How a line begins in which a process says why it ends (lockstep.hosts.exit)."""

LAST_LINES = 40
"""Number of last lines of a failed process that are shown again."""
POLL_S = 0.05
"""Seconds between two checks of which processes still run."""
PEER_FAILED_EXIT_CODE = 85
"""Exit code of a process that ended because another one failed (lockstep.hosts.peers)."""
CAUSE_S = 0.5
"""Seconds after a process ended because of another one in which that other one may end too, and is then named."""
REPORT_S = 3.0
"""Seconds that the other processes have, after one failed, to report what is wrong before they get SIGTERM."""


class Backend(Protocol):
    """Where the processes of a job run."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that this backend has beside the common ones; those of other backends are unknown to it."""

    def run(self, options: argparse.Namespace) -> int:
        """Run ``options.command`` on every process, with ``options.env`` set.

        Returns:
            The exit code of the job: 0 if every process ended with 0, else the one of the process that failed first.
        """


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the backend, and return its exit code."""
    options = parse(sys.argv[1:] if argv is None else argv)
    return BACKENDS[options.backend].run(options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options before ``--`` and the command after it.

    Returns:
        The common options and those of the chosen backend, and ``command`` as a list.
    """
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    usage = "launch.py [options] -- command [arguments]"
    common = argparse.ArgumentParser(prog="launch.py", usage=usage, add_help=False)
    common.add_argument("--backend", choices=sorted(BACKENDS), default="local", help="where the processes run")
    common.add_argument(
        "--env", type=name_value, action="append", default=[], metavar="NAME=VALUE", help="set in every process"
    )
    epilog = "The options of another backend: launch.py --backend NAME --help"
    parser = argparse.ArgumentParser(
        prog="launch.py", usage=usage, description=__doc__.split("\n")[0], epilog=epilog, parents=[common]
    )
    BACKENDS[common.parse_known_args(argv[:cut])[0].backend].add_options(parser)
    options = parser.parse_args(argv[:cut])
    options.command = argv[cut + 1 :]
    if not options.command:
        parser.error("no command given: put it after '--', as in: launch.py --processes 2 -- lockstep train-lm ...")
    return options


def name_value(text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``, as a type of argparse."""
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text} has no '='; write NAME=VALUE")
    return name, value


def count(text: str) -> int:
    """Read a number of at least 1, as a type of argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; it must be at least 1")
    return int(text)


class Local:
    """CPU processes on this machine, which find each other at a free port of it."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add how many processes there are, and what becomes of their output."""
        add = parser.add_argument_group("local: CPU processes on this machine").add_argument
        add("--processes", type=count, default=2, help="how many processes (default 2)")
        add("--devices_per_process", type=count, default=2, help="CPU devices of each process (default 2)")
        add(
            "--prefix",
            choices=("auto", "always", "never"),
            default="auto",
            help="put '[i] ' before each line. auto: yes, but at a terminal (and without --log_dir) process 0 writes "
            "to it directly, so that its live output works; always: on for all; never: off for all",
        )
        add("--log_dir", type=Path, help="also write the output of process i to <log_dir>/process-<i>.log")
        add("--grace_s", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL (default 10)")

    def run(self, options: argparse.Namespace) -> int:
        """Run the command as ``options.processes`` CPU processes, see `Backend.run`; 127 where it is not found."""
        try:
            command = resolve(options.command)
        except FileNotFoundError as error:
            print(f"launch: {error}", file=sys.stderr)
            return 127
        coordinator = f"127.0.0.1:{free_port()}"
        if options.log_dir:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        own_terminal = options.prefix == "auto" and sys.stdout.isatty() and not options.log_dir
        job = Job(options.grace_s)
        with signals_to(job.received.append):
            for index in range(options.processes):
                environment = local_environment(os.environ, options, coordinator, index)
                prefix = "" if options.prefix == "never" else f"[{index}] "
                log = open(options.log_dir / f"process-{index}.log", "wb") if options.log_dir else None
                job.start(index, command, environment, inherit=own_terminal and index == 0, prefix=prefix, log=log)
            return job.wait()


def local_environment(
    base: Mapping[str, str], options: argparse.Namespace, coordinator: str, index: int
) -> dict[str, str]:
    """Return the environment of process ``index``: CPU devices, gloo, no search for TPUs, and its place in the job."""
    flags = [flag for flag in base.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={options.devices_per_process}")
    proxied = any(name.lower().endswith("_proxy") for name in base)
    no_proxy = ",".join(filter(None, (base.get("no_proxy") or base.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {
        **base,
        **(dict.fromkeys(("no_proxy", "NO_PROXY"), no_proxy) if proxied else {}),
        "PATH": os.pathsep.join(filter(None, (str(Path(sys.executable).parent), base.get("PATH")))),
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": " ".join(flags),
        "LOCKSTEP_COORDINATOR_ADDRESS": coordinator,
        "LOCKSTEP_NUM_PROCESSES": str(options.processes),
        "LOCKSTEP_PROCESS_ID": str(index),
        **dict(options.env),
    }


def resolve(command: Sequence[str]) -> list[str]:
    """Return the command with the path of its program: beside the running interpreter (its venv), else on PATH.

    Raises:
        FileNotFoundError: The program is in neither place.
    """
    program, *arguments = command
    if program in ("python", "python3"):
        return [sys.executable, *arguments]
    if os.sep in program:
        found = program if os.access(program, os.X_OK) else None
    else:
        found = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    if found is None:
        raise FileNotFoundError(
            f"no program {program!r} beside {sys.executable} or on PATH. Run this script with the Python of the "
            "environment that has it, for example .venv/bin/python infra/launch.py (make setup builds it)."
        )
    return [found, *arguments]


def free_port() -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclasses.dataclass(eq=False)
class Child:
    """One process of the job, in a process group of its own, and the last lines that it printed."""

    index: int
    process: subprocess.Popen[bytes]
    prefix: str
    log: IO[bytes] | None
    started: float
    rest: bytes = b""
    last: collections.deque[bytes] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=LAST_LINES))

    def signal(self, number: int) -> None:
        """Send a signal to the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Job:
    """Processes that start and end together.

    Args:
        grace_s: The time in seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, grace_s: float):
        self.grace_s = grace_s
        self.children: list[Child] = []
        self.selector = selectors.DefaultSelector()
        self.received: list[int] = []  # signals to the launcher that are not yet passed on
        self.stopped_by: int | None = None  # the first of them
        self.errors: set[bytes] = set()
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
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
        child = Child(index, process, prefix, log, time.monotonic())
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
        failed = [child for child in self.children if child.process.returncode]
        raised = [c for c in failed if c.process.returncode > 0 and c.process.returncode != PEER_FAILED_EXIT_CODE]
        if failed and self.first_failure is None:
            self.first_failure = time.monotonic()
        if self.first_failure is not None:
            if raised or all_ended or time.monotonic() - self.first_failure > CAUSE_S:
                self._fail((raised or failed)[0])

    def _code(self) -> int:
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.failed is None:
            return 0
        print(f"launch: failed: process {self.failed.index}, {describe(self.failed)}", file=sys.stderr, flush=True)
        code = self.failed.process.returncode
        return code if code > 0 else 128 - code

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
        # What it said of its own accord stands a few lines above; output that just ends is worth seeing again.
        if child.last and not any(line.startswith(ERROR) for line in child.last):
            print("launch: its last lines:", file=sys.stderr)
            for line in child.last:
                print(f"[{child.index}] " + line.decode(errors="replace"), file=sys.stderr)
        sys.stderr.flush()
        self.terminate_at = time.monotonic() + min(self.grace_s, REPORT_S)

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
            *lines, child.rest = (child.rest + data).split(b"\n")
            for line in lines:
                self._show(child, line)

    def _show(self, child: Child, line: bytes) -> None:
        child.last.append(line)
        if child.log:
            child.log.write(line + b"\n")
        # An error that stopped every process is said by each of them: one copy is enough at the terminal.
        repeated = line.startswith(ERROR) and line in self.errors
        if line.startswith(ERROR):
            self.errors.add(line)
        # After Ctrl-C the leader may still report something; N copies of a stack trace are of no use.
        if not repeated and (self.stopped_by is None or child.index == 0):
            sys.stdout.buffer.write(child.prefix.encode() + line + b"\n")
            sys.stdout.buffer.flush()

    def _finish(self, child: Child) -> None:
        self._drain(child)
        if child.rest:
            self._show(child, child.rest)
        if child.log:
            child.log.close()


@contextlib.contextmanager
def signals_to(receive: Callable[[int], object]) -> Iterator[None]:
    """Pass SIGINT, SIGTERM and SIGHUP to a function while the block runs."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: receive(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(child: Child) -> str:
    """Return how and when a process ended, as text."""
    code = child.process.returncode
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return f"{how}, after {time.monotonic() - child.started:.1f} s"


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher is killed (prctl PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


BACKENDS: dict[str, Backend] = {"local": Local()}


if __name__ == "__main__":
    sys.exit(main())
