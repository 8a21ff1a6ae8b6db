"""The lease of a directory: one job at a time writes there, and the next one takes over where the last was killed."""

import atexit
import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from lockstep.errors import ConfigError, LockstepError
from lockstep.files import write_file
from lockstep.json_text import parse_json, typed
from lockstep.limits import read_object, read_small
from lockstep.printable import get_logger, without_credentials
from lockstep.storage import call_storage
from lockstep.urls import url_to_fs

log = get_logger(__name__)

LEASE: Final = "lease.json"
RENEW_S: Final = 10.0  # seconds between two renewals
OLD_S: Final = 45.0  # seconds without a renewal after which the job counts as dead
GIVE_BACK_S: Final = 5.0  # seconds that giving it back may take: it is old soon anyway
_FIX: Final = "trainer.run_id"
SETTLE_S: Final = 0.5  # seconds after which of two jobs that took a lease at once both see whose it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """The job that has a lease."""

    token: str
    host: str
    machine: str  # names what process numbers are of: this start of this machine, this container
    pid: int
    started: str  # when the process began, by the kernel: its number may be another process's by now
    renewed: float  # seconds since the epoch, by the clock of its host

    @property
    def is_dead(self) -> bool:
        """Whether its process was on this machine and is gone, or is this one."""
        return self.machine == _machine() and (self.pid == os.getpid() or _start_of(self.pid) != self.started)


class Lease:
    """Takes the lease of a directory and renews it from a thread until the process ends, which gives it back.

    Args:
        place: The directory, which is there, or a URL.
        file: Where the lease is written, where that is not in the place.
        fix: What the job can choose instead, for the error where another job has the lease.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        file: str | os.PathLike[str] | None = None,
        fix: str = _FIX,
        renew_s: float = RENEW_S,
        old_s: float = OLD_S,
    ) -> None:
        self._place, self._renew_s, self._old_s = os.fspath(place).rstrip("/"), renew_s, old_s
        self._fix = fix
        self._path = f"{self._place}/{LEASE}" if file is None else os.fspath(file)
        self._filesystem: Any = None
        if "://" in self._path:
            self._filesystem, self._path = url_to_fs(self._path)
        self._token = secrets.token_hex(8)
        self._given_back = threading.Event()

    def take(self) -> None:
        """Take the lease; one process of a job calls it.

        The lease of a job that was killed on another machine is waited for until it is old.

        Raises:
            ConfigError: Another job has it.
            OSError: It cannot be written.
        """
        before = self._read()
        if before is not None and not before.is_dead:
            self._wait_until_old(before)
        created = self._create(before)
        if not created:
            self._write()
        if not created or self._filesystem is not None:  # not every bucket tells whether an object is new
            time.sleep(SETTLE_S)
            if (holder := self._read()) is not None and holder.token != self._token:
                raise self._refused(holder)
        threading.Thread(target=self._renew, name="lockstep-lease", daemon=True).start()
        atexit.register(self.give_back)

    def is_of(self, file: str) -> bool:
        """Return whether it is written to a file, a path or URL."""
        return self._path == (url_to_fs(file)[1] if "://" in file else file)

    def give_back(self) -> None:
        """Remove the lease, where it is still this job's."""
        self._given_back.set()
        atexit.unregister(self.give_back)
        with contextlib.suppress(Exception):  # storage libraries have their own errors; an old lease is taken over
            call_storage(f"giving back {without_credentials(self._path)}", self._remove, GIVE_BACK_S)

    def _remove(self) -> None:
        holder = self._read()
        if holder is not None and holder.token == self._token:
            if self._filesystem is None:
                os.unlink(self._path)
            else:
                self._filesystem.rm_file(self._path)

    def _wait_until_old(self, before: Holder) -> None:
        left_s = self._old_s - max(time.time() - before.renewed, 0.0)
        end = time.monotonic() + left_s
        if left_s > 0:
            log.warning("%s: %s; waiting at most %.0f s for its next sign of life", *self._shown(before), left_s)
        while time.monotonic() < end:
            time.sleep(min(1.0, self._renew_s / 4))
            holder = self._read()
            if holder is None:
                return
            if holder != before:
                raise self._refused(holder)

    def _refused(self, holder: Holder) -> ConfigError:
        return ConfigError(
            "{}: {}, so another job writes there now, and files of two would mix. Wait until it has ended, end it, or "
            "choose another {}.".format(*self._shown(holder), self._fix)
        )

    def _shown(self, holder: Holder) -> tuple[str, str]:
        ago_s = max(time.time() - holder.renewed, 0.0)
        owner = f"process {holder.pid} on {holder.host} has its lease, renewed {ago_s:.0f} s ago"
        return without_credentials(self._place), owner

    def _read(self) -> Holder | None:
        """The job that has the lease; None where none has, or what is there is no lease."""
        try:
            if self._filesystem is None:
                text = read_small(self._path)
            else:
                self._filesystem.invalidate_cache()
                text = read_object(self._filesystem, self._path)
        except FileNotFoundError:
            return None
        with contextlib.suppress(LockstepError, TypeError):
            return typed(Holder, parse_json(text, self._path, dict, ""))
        return None

    def _create(self, before: Holder | None) -> bool:
        """Write the lease where none is, which one job alone can do, however slow another is; whether it was written.

        Args:
            before: The holder whose lease may be taken over.

        Raises:
            ConfigError: Another job has written one meanwhile.
        """
        try:
            if self._filesystem is not None:
                self._filesystem.pipe_file(self._path, self._text(), mode="create")
            else:
                with self._draft() as draft:
                    os.link(draft, self._path)
        except FileExistsError:
            holder = self._read()
            if holder is not None and (before is None or holder.token != before.token):
                raise self._refused(holder) from None
            return False
        except Exception:  # a file system without links, a bucket that cannot; storage libraries have their own
            return False
        return True

    @contextlib.contextmanager
    def _draft(self) -> Iterator[str]:
        """The lease under another name, so that nobody reads a part of it."""
        draft = f"{self._path}.{self._token}"
        write_file(draft, self._text())
        try:
            yield draft
        finally:
            os.unlink(draft)

    def _text(self) -> bytes:
        host, pid = socket.gethostname(), os.getpid()
        holder = Holder(
            token=self._token, host=host, machine=_machine(), pid=pid, started=_start_of(pid), renewed=time.time()
        )
        return json.dumps(dataclasses.asdict(holder)).encode()

    def _write(self) -> None:
        if self._filesystem is not None:
            self._filesystem.pipe_file(self._path, self._text())
        else:
            write_file(self._path, self._text())

    def _renew(self) -> None:
        while not self._given_back.wait(self._renew_s):
            try:
                holder = self._read()
                if holder is not None and holder.token != self._token:
                    if holder.pid != os.getpid():
                        log.error("%s: %s. It was taken from this job, which was not heard of", *self._shown(holder))
                    return
                self._write()
            except Exception as error:  # storage libraries have their own
                log.warning("the lease of %s was not renewed: %s", without_credentials(self._place), error)


def _machine() -> str:
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts)


def _start_of(pid: int) -> str:
    """When a process of this machine began, in the kernel's ticks; empty where there is none, or no /proc."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]  # a process that has ended, and is not waited for


_LEASES: Final[list[Lease]] = []


def take_lease(place: str | os.PathLike[str], *, file: str | os.PathLike[str] | None = None, fix: str = _FIX) -> None:
    """Take the lease of a directory or a URL until `giving_back_leases` ends, or the process does; see `Lease`.

    Raises:
        ConfigError: Another job has it.
        OSError: It cannot be written.
    """
    lease = Lease(place, file=file, fix=fix)
    lease.take()
    _LEASES.append(lease)


@contextlib.contextmanager
def leased(place: str | os.PathLike[str], file: str, fix: str) -> Iterator[None]:
    """A context in which this process has the lease of a place, and gives it back unless it had it before.

    Args:
        place, file, fix: As of `Lease`; the directory of the file is made.

    Raises:
        ConfigError: Another job has it.
        OSError: It cannot be written.
    """
    if any(lease.is_of(file) for lease in _LEASES):
        yield
        return
    if "://" not in file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    lease = Lease(place, file=file, fix=fix)
    lease.take()
    try:
        yield
    finally:
        lease.give_back()


@contextlib.contextmanager
def giving_back_leases() -> Iterator[None]:
    """A context, or a decorator of a job, at whose end this process gives back what it has taken."""
    try:
        yield
    finally:
        while _LEASES:
            _LEASES.pop().give_back()
