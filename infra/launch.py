#!/usr/bin/env python3
"""Start one command on every process of a job, show what they print, and end them together.

    python infra/launch.py --backend local --processes 2 --devices_per_process 2 -- lockstep train-lm --config_path X

Standard library only: it runs with any Python >= 3.12, before anything is installed. A backend is a function from the
parsed options to an exit code, entered in ``BACKENDS``; ``local`` simulates a pod as CPU processes on one machine.
"""

import argparse
import collections
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

LAST_LINES = 40
"""Lines of a failed process that are shown again."""

POLL_S = 0.05
"""Seconds between two looks at which processes still run."""

PEER_FAILED_EXIT_CODE = 85
"""How a process ends that was told of another one's failure (lockstep.hosts.peers)."""

RAISED_S = 0.5
"""Seconds in which, after a process ended in consequence, the one that caused it may turn up."""

OWN_WORDS_S = 3.0
"""Seconds that the others have, after a process failed, to say what is wrong before they are asked to end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the backend, and return its exit code."""
    options = parse(sys.argv[1:] if argv is None else argv)
    return BACKENDS[options.backend](options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options before ``--``, the command after it."""
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="launch.py", usage="launch.py [options] -- command [arguments]", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="local", help="where the processes run")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set in every process")
    local = parser.add_argument_group("local: CPU processes on this machine")
    local.add_argument("--processes", type=int, default=2, help="how many processes (default 2)")
    local.add_argument("--devices_per_process", type=int, default=2, help="CPU devices of each process (default 2)")
    local.add_argument(
        "--prefix",
        choices=("auto", "always", "never"),
        default="auto",
        help="put '[i] ' before each line. auto: yes, but at a terminal (and without --log_dir) process 0 writes to it "
        "directly, so that its live output works; always: on for all; never: off for all",
    )
    local.add_argument("--log_dir", type=Path, help="also write the output of process i to <log_dir>/process-<i>.log")
    local.add_argument("--grace_s", type=float, default=10.0, help="seconds between asking to end and killing")
    options = parser.parse_args(argv[:cut])
    options.command = argv[cut + 1 :]
    if not options.command:
        parser.error("no command given: put it after '--', as in: launch.py --processes 2 -- lockstep train-lm ...")
    for name in ("processes", "devices_per_process"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    for pair in options.env:
        if "=" not in pair:
            parser.error(f"--env {pair} has no '='; write NAME=VALUE")
    return options


# ---------------------------------------------------------------- local backend


def run_local(options: argparse.Namespace) -> int:
    """Run the command as ``options.processes`` CPU processes; the exit code is the first failing one's, else 0."""
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
    with job.signals():
        for index in range(options.processes):
            environment = local_environment(os.environ, options, coordinator, index)
            prefix = "" if options.prefix == "never" else f"[{index}] "
            log = open(options.log_dir / f"process-{index}.log", "wb") if options.log_dir else None
            job.start(index, command, environment, inherit=own_terminal and index == 0, prefix=prefix, log=log)
        return job.wait()


def local_environment(
    base: Mapping[str, str], options: argparse.Namespace, coordinator: str, index: int
) -> dict[str, str]:
    """The environment of process ``index``: CPU devices, gloo collectives, no search for TPUs, its place in the job."""
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
        **dict(pair.split("=", 1) for pair in options.env),
    }


def resolve(command: Sequence[str]) -> list[str]:
    """The command with its program looked up beside the running interpreter first (its venv), then on PATH."""
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
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# ---------------------------------------------------------------- processes


@dataclasses.dataclass(eq=False)
class Child:
    """One process of the job, in a process group of its own, and what it printed last."""

    index: int
    process: subprocess.Popen[bytes]
    prefix: str
    log: IO[bytes] | None
    started: float
    rest: bytes = b""
    last: collections.deque[bytes] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=LAST_LINES))

    def signal(self, number: int) -> None:
        """Send a signal to the process and everything it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass


class Job:
    """Processes that live and end together."""

    def __init__(self, grace_s: float):
        self.grace_s = grace_s
        self.children: list[Child] = []
        self.selector = selectors.DefaultSelector()
        self.received: list[int] = []  # signals to the launcher that are not yet passed on
        self.stopped_by: int | None = None  # the first of them
        self.failed: Child | None = None
        self.first_failure: float | None = None
        self.asked_at: float | None = None  # when what still runs after a failure is asked to end
        self.deadline: float | None = None  # when what still runs is killed

    def signals(self) -> "SignalGuard":
        return SignalGuard(lambda number: self.received.append(number))

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
        """Start one process; with ``inherit`` it writes to our own terminal instead of through us."""
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
                self._look_for_failure(last_look=None not in codes)
            if None not in codes:
                break
            if self.asked_at is not None and time.monotonic() > self.asked_at:
                self._ask_the_others()
            if self.deadline is not None and time.monotonic() > self.deadline:
                self._all(signal.SIGKILL)
        self._all(signal.SIGKILL)  # whatever they started and left behind
        self._read(0.0)
        for child in self.children:
            self._finish(child)
        return self._code()

    def _look_for_failure(self, last_look: bool) -> None:
        """Name the process that failed first; rather one that raised than one that ended in consequence."""
        failed = [child for child in self.children if child.process.returncode]
        raised = [c for c in failed if c.process.returncode > 0 and c.process.returncode != PEER_FAILED_EXIT_CODE]
        if failed and self.first_failure is None:
            self.first_failure = time.monotonic()
        if self.first_failure is not None:
            if raised or last_look or time.monotonic() - self.first_failure > RAISED_S:
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
                self._all(signal.SIGKILL)
                continue
            name = signal.Signals(number).name
            print(f"\nlaunch: {name}, ending {len(self.children)} process(es)", file=sys.stderr, flush=True)
            self._all(number)
            self.deadline = time.monotonic() + self.grace_s

    def _fail(self, child: Child) -> None:
        """Say who failed and with what last words; the others get a moment to say themselves what is wrong."""
        self.failed = child
        self._drain(child)
        print(f"launch: process {child.index} failed, {describe(child)}", file=sys.stderr)
        if child.last:
            print("launch: its last lines:", file=sys.stderr)
            for line in child.last:
                print(f"[{child.index}] " + line.decode(errors="replace"), file=sys.stderr)
        sys.stderr.flush()
        self.asked_at = time.monotonic() + min(self.grace_s, OWN_WORDS_S)

    def _ask_the_others(self) -> None:
        """Ask what still runs after a failure to end."""
        self.asked_at = None
        others = [other for other in self.children if other.process.poll() is None]
        if others:
            print(f"launch: ending the other {len(others)} process(es)", file=sys.stderr, flush=True)
        for other in others:
            other.signal(signal.SIGTERM)
        self.deadline = time.monotonic() + min(self.grace_s, 3.0)

    def _all(self, number: int) -> None:
        for child in self.children:
            child.signal(number)

    def _read(self, timeout_s: float) -> None:
        if not self.selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self.selector.select(timeout_s):
            self._drain(key.data, reads=1)

    def _drain(self, child: Child, reads: int = 256) -> None:
        """Take what is in the pipe now, but not for ever; whole lines are shown, the rest waits."""
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
        # After Ctrl-C the leader may still have something to say; N copies of a stack trace say nothing.
        if self.stopped_by is None or child.index == 0:
            sys.stdout.buffer.write(child.prefix.encode() + line + b"\n")
            sys.stdout.buffer.flush()

    def _finish(self, child: Child) -> None:
        self._drain(child)
        if child.rest:
            self._show(child, child.rest)
        if child.log:
            child.log.close()


class SignalGuard:
    """Hands SIGINT, SIGTERM and SIGHUP to a function while the block runs."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, receive: Callable[[int], object]):
        self.receive = receive

    def __enter__(self) -> None:
        self.before = {number: signal.signal(number, lambda n, _: self.receive(n)) for number in self.NUMBERS}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def describe(child: Child) -> str:
    """How and when a process ended, in words."""
    code = child.process.returncode
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return f"{how}, after {time.monotonic() - child.started:.1f} s"


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher is killed (prctl PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


BACKENDS: dict[str, Callable[[argparse.Namespace], int]] = {"local": run_local}


if __name__ == "__main__":
    sys.exit(main())
