"""The process on a worker that runs the command, outlives the connection that started it, and notes how it ended."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from lockstep.files import private, write_file
from lockstep.redact import Redactor

LOCK = "lock"  # locked by the supervisor as long as it lives: the kernel gives it back however it ends
LOG = "log"  # the output of the command, without secrets
EXIT = "exit.json"  # the end of the command; written when it and everything it started is gone and the log is whole
STATE = "state.json"  # the process number of the command and when it began
LEASE = "lease"  # its time of change is when the launcher was last heard of
STOP = "stop"  # `stop` or `kill`: what the launcher asks for


def write_json(path: str, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_file(path, json.dumps(value), 0o600, fsync=True)


def read_json(path: str) -> Any:
    """Read a JSON file; None where there is none."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read().decode())
    except FileNotFoundError:
        return None


def is_locked(directory: str) -> bool:
    """Whether the supervisor of an attempt lives."""
    try:
        descriptor = private(os.path.join(directory, LOCK), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def claim(directory: str) -> int | None:
    """Make the directory of an attempt, with its lock taken; None where it is there: the attempt was started before.

    It appears with the lock in it, by one rename, so that of two connections exactly one starts the command.
    """
    temporary = f"{directory}.tmp-{os.getpid()}"
    os.makedirs(temporary, mode=0o700)
    lock = os.path.join(temporary, LOCK)
    descriptor = private(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        os.rename(temporary, directory)  # refused where the other directory has files
        return descriptor
    except OSError:
        os.close(descriptor)
        os.unlink(lock)
        os.rmdir(temporary)
        if os.path.isdir(directory):
            return None
        raise


POLL_S = 0.1  # seconds between two looks at the command, the lease and what the launcher asks for
DRAIN_S = 1.0  # seconds in which output may still come after the command and its process group have ended


def start(directory: str, spec: dict[str, Any]) -> bool:
    """Start the command of an attempt in a session of its own; False where it was started before.

    Args:
        spec: ``argv``, ``cwd``, ``path``, ``env``, ``secrets``, ``lease_s`` (None: none), ``grace_s``.
    """
    sys.stdout.flush()
    # A connection that ends from here on must not leave an attempt that is claimed and that nobody runs.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    lock = claim(directory)
    if lock is None or os.fork():
        for hang_up, handler in handlers.items():
            signal.signal(hang_up, handler or signal.SIG_DFL)
        if lock is not None:
            os.close(lock)
        return lock is not None
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        trouble = private(os.path.join(directory, "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, descriptor in enumerate((null, null, trouble)):
            os.dup2(descriptor, number)  # the connection waits for everybody who has its pipes
        for number in range(3, 256):
            if number != lock:
                try:
                    os.close(number)
                except OSError:
                    pass
        Supervisor(directory, spec).run()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(0)


def environment(spec: dict[str, Any]) -> dict[str, str]:
    """The variables of the command: this machine's, then the job's, whose directories of programs are first on PATH."""
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **spec["env"], **spec["secrets"]}
    path = [os.path.expanduser(directory) for directory in spec["path"]]
    path += [variables.get("PATH", os.defpath), os.path.expanduser("~/.local/bin")]
    return {**variables, "PATH": os.pathsep.join(path)}


def find_program(program: str, environ: dict[str, str], cwd: str) -> str | None:
    """The path of a program: on PATH, or with a slash in its name, below the directory in which it runs."""
    if os.sep in program:
        path = os.path.join(cwd, os.path.expanduser(program))
        return path if os.access(path, os.X_OK) and os.path.isfile(path) else None
    return shutil.which(program, path=environ["PATH"])


class Supervisor:
    """Runs one command to its end."""

    def __init__(self, directory: str, spec: dict[str, Any]) -> None:
        self._directory, self._spec = directory, spec
        self._redactor = Redactor(spec["secrets"].values())
        self._log = open(self._file(LOG), "ab", buffering=0, opener=private)
        self._requested = ""  # what the launcher has asked for and was done
        self._kill_at: float | None = None
        self._reason = ""

    def _file(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def run(self) -> None:
        """Start the command, write its output, and note how it ended."""
        environ = environment(self._spec)
        argv = list(self._spec["argv"])
        cwd = os.path.expanduser(self._spec["cwd"] or "~")
        program = find_program(argv[0], environ, cwd)
        text = ""
        if program is None:
            text = f"no program {argv[0]!r} in {environ['PATH']}"
        try:
            os.makedirs(cwd, exist_ok=True)
        except OSError as error:
            text = f"the directory {cwd} of the command cannot be made: {error}"
        if text:
            self._write(b"error: " + text.encode() + b"\n")
            self._end(127)
            return
        open(self._file(LEASE), "wb", opener=private).close()
        try:
            process = subprocess.Popen(
                [program or "", *argv[1:]],
                cwd=cwd,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except (OSError, ValueError) as error:  # no program, or arguments and variables that no program can be given
            self._write(f"error: {program} cannot be started: {error}\n".encode())
            self._end(126)
            return
        self._process = process
        signal.signal(signal.SIGTERM, lambda *_: self._ask("stop", "the worker is shut down"))
        write_json(self._file(STATE), {"pid": process.pid, "started": time.time()})
        self._watch()
        code = process.returncode
        self._end(code if code >= 0 else 128 - code)

    def _watch(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        pipe = stdout.fileno()
        seen, heard, looked = 0, time.monotonic(), 0.0
        ended: float | None = None
        while True:
            ready, _, _ = select.select([pipe], [], [], POLL_S)
            data = os.read(pipe, 1 << 16) if ready else None
            if data:
                self._write(self._redactor.feed(data))
            now = time.monotonic()
            if ended is None and now - looked < POLL_S and data != b"":
                continue
            looked = now
            if ended is None and self._process.poll() is not None:
                ended = now
                self._signal(signal.SIGKILL)  # what the command started and left behind
            if ended is not None and (data == b"" or now - ended > DRAIN_S):
                break
            if data == b"" and ended is None:
                time.sleep(POLL_S)  # it has closed its output and goes on
            if ended is not None:
                continue
            changed = os.stat(self._file(LEASE)).st_mtime_ns
            if changed != seen:
                seen, heard = changed, now
            lease = self._spec["lease_s"]
            if lease is not None and now - heard > lease:
                self._ask("stop", f"nothing was heard of the launcher for {lease:g} s")
            self._look_for_requests()
            if self._kill_at is not None and now > self._kill_at:
                self._signal(signal.SIGKILL)
        self._write(self._redactor.flush())

    def _look_for_requests(self) -> None:
        try:
            with open(self._file(STOP), encoding="utf-8") as file:
                self._ask(file.read().strip(), "the launcher asked for it")
        except FileNotFoundError:
            pass

    def _ask(self, request: str, reason: str) -> None:
        """End the command: with ``stop`` it has time, with ``kill`` none."""
        if request == self._requested or self._requested == "kill":
            return
        self._requested, self._reason = request, self._reason or reason
        if request == "kill":
            self._signal(signal.SIGKILL)
        else:
            self._signal(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._spec["grace_s"]

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self._log.write(data) :]

    def _end(self, code: int) -> None:
        os.fsync(self._log.fileno())
        write_json(self._file(EXIT), {"code": code, "ended": time.time(), "reason": self._reason})


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is killed (prctl PR_SET_PDEATHSIG = 1), where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
