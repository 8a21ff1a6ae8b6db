"""A backend of the launcher, and what it is made of: console, workers, a way to reach them, patience."""

import abc
import argparse
import collections
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lockstep.errors import LockstepError
from lockstep.exits import FAILED, UNREACHABLE
from lockstep.files import private
from lockstep.launch.record import JobRecord
from lockstep.printable import printable, without_credentials, write_to_stdout
from lockstep.redact import Redactor

ERROR = b"error: "  # the beginning of a line in which a process says why it ends (lockstep.hosts.exit)


class Console:
    """The terminal, and the file ``launcher.log`` of the job.

    Args:
        redactor: Takes secrets out of everything; None: there are none.
        log: The file to which the launcher's own lines are added; None: none.
        prefixed: Whether lines of processes begin with their numbers.
    """

    def __init__(self, redactor: Redactor | None = None, log: Path | None = None, prefixed: bool = True) -> None:
        self._redactor = redactor or Redactor(())
        self._log, self._prefixed = log, prefixed
        self._lock = threading.Lock()
        # The errors that each process has printed, and those that were shown: a terminal needs one copy of each.
        self._printed: collections.Counter[tuple[int, bytes]] = collections.Counter()
        self._errors: collections.Counter[bytes] = collections.Counter()
        self._shown_once: set[str] = set()

    def say(self, text: str) -> None:
        """Print lines of the launcher's own to standard error, each after ``launch: ``; parts may be of a worker."""
        shown = printable(without_credentials(text))
        self.raw("".join(f"launch: {line}\n" for line in shown.split("\n")))

    def once(self, text: str) -> None:
        """As `say`, but not again what was said before, until it is forgotten."""
        if text not in self._shown_once:
            self._shown_once.add(text)
            self.say(text)

    def forget(self, beginning: str) -> bool:
        """Forget what begins so; return whether it was said."""
        known = {text for text in self._shown_once if text.startswith(beginning)}
        self._shown_once -= known
        return bool(known)

    def raw(self, text: str) -> None:
        """Print a text as it is to standard error."""
        text = self._redactor.text(text)
        with self._lock:
            with contextlib.suppress(OSError):  # a terminal that was closed: what is to be done then goes on
                print(text, end="", file=sys.stderr, flush=True)
            if self._log is not None:
                with open(self._log, "a", encoding="utf-8", opener=private) as file:
                    file.write(text)

    def line(self, process: int, line: bytes) -> None:
        """Print a line of a process, which has no end of line, to standard output; an error of all processes once."""
        prefix = f"[{process}] ".encode() if self._prefixed else b""
        with self._lock:
            if line.startswith(ERROR):
                self._printed[process, line] += 1
                if self._printed[process, line] <= self._errors[line]:
                    return
                self._errors[line] += 1
            write_to_stdout(lambda: sys.stdout.buffer.write(prefix + line + b"\n"))


class Lines:
    """Output that comes in pieces, given on line by line, without ends of lines."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take, self._rest = take, b""

    def feed(self, data: bytes) -> None:
        """Give on the lines that are whole now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)

    def end(self) -> None:
        """Give on what has no end of line, as no more will come."""
        if self._rest:
            self._take(self._rest)
            self._rest = b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """One machine of a job, which runs one process of it. Its place in the list is its number."""

    name: str  # how it is called in messages: a host name, or `NAME/3`
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # how its process finds the others; public
    ports: tuple[int, ...] = ()  # ports that must be free on it before the job starts
    reaches: tuple[str, ...] = ()  # ports of another worker, as `host:port`, that its network must let it reach
    path: tuple[str, ...] = ()  # directories on it that are searched for programs first; `~` is its home directory


class Transport(Protocol):
    """A way to run a shell command on each worker."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers, by number."""

    def argv(self, worker: int, command: str) -> list[str]:
        """The local command that runs ``command`` in a shell on a worker.

        Its standard input, output and error are those of the remote command: no terminal (``ssh -T``), nothing of its
        own on standard output. It may take any time to fail when the worker cannot be reached; it must not try again
        once the remote command has begun. Files are copied over its standard input too.
        """


def jax_environment(coordinator: str, processes: int, index: int) -> dict[str, str]:
    """The variables with which a process joins its job where JAX cannot find out by itself (lockstep.hosts.config)."""
    return {
        "LOCKSTEP_COORDINATOR_ADDRESS": coordinator,
        "LOCKSTEP_NUM_PROCESSES": str(processes),
        "LOCKSTEP_PROCESS_ID": str(index),
    }


class WorkerBackend(abc.ABC):
    """A backend whose workers can be reached one by one: it says how to get them, reach them and give them back.

    All methods take the options as parsed; for ``status``, ``logs``, ``stop`` and ``delete`` they come from the job's
    record, so that they must be plain JSON values. Options that do not fit together are refused (ConfigError) before
    anything is done, by `dry_run` too; what the platform refuses is a `LaunchError`.
    """

    given_up: Callable[[], bool] = staticmethod(lambda: False)
    """Whether somebody has stopped or deleted the job: a wait of `acquire` then ends, with a `LaunchError`."""

    @abc.abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add this backend's own options, after ``options.add_worker_options(parser)``."""

    def default_name(self, options: argparse.Namespace) -> str | None:
        """The job's name where ``--name`` gives none; None: one with the date."""
        return None

    @abc.abstractmethod
    def dry_run(self, options: argparse.Namespace) -> tuple[list[str], Transport]:
        """For ``--dry-run``: the shell commands of `acquire`, ready to paste, and the transport as it will be."""

    @abc.abstractmethod
    def acquire(self, options: argparse.Namespace, console: Console) -> Transport:
        """Create the workers or find them, wait until they can be reached, and show the states as they come.

        It is called again before each retry: what was lost is replaced, what is there is used as it is.
        """

    @abc.abstractmethod
    def find(self, options: argparse.Namespace) -> Transport:
        """The workers of a job that exists: nothing is created, nothing is waited for."""

    def setup_script(self, options: argparse.Namespace) -> str | None:
        """A POSIX shell script that is run on every worker before the job; a second run must find nothing to do."""
        return None

    def setup_files(self, options: argparse.Namespace) -> dict[str, bytes]:
        """Files that `setup_script` needs (a wheel), by name; they are put into the directory that it runs in."""
        return {}

    def setup_folder(self, options: argparse.Namespace) -> str | None:
        """For ``--dry-run``: a local directory that its commands fill with `setup_files` and ``setup.sh``."""
        return None

    def why_lost(self, options: argparse.Namespace) -> str | None:
        """The reason why the platform took workers away ("node my-pod is PREEMPTED"), None where it did not.

        It is asked every few seconds while a worker cannot be reached, and before a retry.
        """
        return None

    @abc.abstractmethod
    def release(self, options: argparse.Namespace, console: Console) -> None:
        """Delete the workers that `acquire` created, if it did; ``lockstep launch delete`` calls it."""


def root_on_worker(name: str, index: int) -> str:
    """The directory of a job on a worker; with the worker's number, as several may share a home directory."""
    return f"~/.lockstep/work/{name}/worker-{index}"


class LaunchError(LockstepError):
    """A job cannot be started or reached: the text says what was given, the limit and the fix.

    Args:
        code: The exit code of the launcher, from `lockstep.exits`; it decides whether ``--retries`` tries again.
    """

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class Backend(Protocol):
    """The platform of a job's processes. Every method but `add_options` returns the launcher's exit code."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add this backend's own options, and the shared groups of `options` that have a meaning for it."""

    def run(self, options: argparse.Namespace) -> int:
        """Run ``options.command`` on every process; 0 if every one ended with 0, else the code of the first failure."""

    def dry_run(self, options: argparse.Namespace) -> int:
        """Print each command and manifest of `run`, ready to paste, and do nothing. Secrets are not shown."""

    def status(self, job: JobRecord) -> int:
        """Print what each worker does; 0 while the job runs and when it is done, else its exit code."""

    def logs(self, job: JobRecord, *, follow: bool) -> int:
        """Print what the workers have printed; with ``follow`` until they have ended."""

    def stop(self, job: JobRecord) -> int:
        """End the job in order (SIGTERM, grace, SIGKILL); 0 when nothing of it runs any more."""

    def delete(self, job: JobRecord) -> int:
        """Stop the job and delete what was created for it on the workers, and the workers where `run` created them."""


type Backends = Mapping[str, Callable[[], Backend | WorkerBackend]]
"""Classes of backends by their names: each job has a backend of its own."""


LIMIT_S = 600.0  # seconds after which a platform that cannot be reached ends the launcher, not the job


class Patience:
    """Asks again where a platform does not answer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since: float | None = None

    def look[Found](self, ask: Callable[[], Found]) -> Found | None:
        """The answer of the platform; None where it cannot be reached now; after ``LIMIT_S`` its error."""
        try:
            answer = ask()
        except LaunchError as error:
            if error.code != UNREACHABLE:
                raise
            if self._since is None:
                self._since = time.monotonic()
                self._console.say(f"{error}\nThe job goes on; asking again.")
            if time.monotonic() - self._since > LIMIT_S:
                raise
            return None
        if self._since is not None:
            self._console.say("it answers again")
            self._since = None
        return answer

    def do(self, action: Callable[[], object]) -> bool:
        """Whether what the platform is told has reached it."""
        return self.look(lambda: (action(),)) is not None

    def insist(self, action: Callable[[], object], poll_s: float) -> None:
        """Tell the platform until it has reached it."""
        while not self.do(action):
            time.sleep(poll_s)
