"""The record of a job on the machine of the launcher: a directory with one JSON file and the logs of all attempts."""

import argparse
import dataclasses
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.json_text import parse_json, refused, typed

DIRECTORY = "LOCKSTEP_JOBS_DIR"  # the variable that names another directory than `~/.lockstep/jobs`
NOT_KEPT = ("command", "env", "env_file", "dry_run")
"""Options that are not in the record: they are kept elsewhere, may be secret, or mean nothing later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the command on all workers."""

    number: int  # from 1
    id: str  # its name on the workers, of no other attempt anywhere
    started: float  # when it was started, in seconds since 1970
    launched: bool = False  # whether the workers were fit, and the command was started on them
    ended: float | None = None  # when it had ended on all workers; None: not known to have
    code: int | None = None
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job: what it is, where, and how its attempts ended. No secret is in it."""

    name: str
    backend: str
    command: tuple[str, ...]
    options: Mapping[str, Any]  # the options that it was started with, as JSON values
    attempts: tuple[Attempt, ...] = ()
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what a backend remembers, as JSON values
    deleted: bool = False

    @property
    def directory(self) -> Path:
        return jobs_directory() / self.name

    def log(self, attempt: int, worker: int) -> Path:
        """The file with what a worker has printed."""
        return self.directory / f"attempt-{attempt}" / f"worker-{worker}.log"

    def namespace(self) -> argparse.Namespace:
        """The options as the backend's methods take them; ``env`` and ``env_file`` are empty."""
        return argparse.Namespace(
            **{**self.options, "command": list(self.command), "env": [], "env_file": None, "dry_run": False}
        )

    def with_attempt(self, attempt: Attempt) -> "JobRecord":
        """The record with an attempt added, or replaced where there is one of this number."""
        attempts = [earlier for earlier in self.attempts if earlier.number != attempt.number]
        return dataclasses.replace(self, attempts=(*attempts, attempt))

    def with_end(self, code: int) -> "JobRecord":
        """The record whose last attempt has ended now."""
        return self.with_attempt(dataclasses.replace(self.attempts[-1], ended=time.time(), code=code))

    def save(self) -> None:
        """Write the record, whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(self.directory / "job.json", json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def make_directory(self) -> None:
        """Make the directory, without logs of an earlier job of this name, which go to ``earlier-N``."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if logs := [*self.directory.glob("attempt-*")]:
            numbers = (int(path.name.partition("-")[2]) for path in self.directory.glob("earlier-*"))
            earlier = self.directory / f"earlier-{max(numbers, default=0) + 1}"
            earlier.mkdir(mode=0o700)
            for path in logs:
                path.rename(earlier / path.name)


def kept_logs(directory: Path, attempt: int | None = None) -> list[tuple[int, int, Path]]:
    """The attempt, the worker and the file of each log in a job's directory, in their order; of one attempt or all."""

    def number(name: str) -> int:
        return int(name.rpartition("-")[2])

    paths = directory.glob(f"attempt-{'*' if attempt is None else attempt}/worker-*.log")
    return sorted((number(path.parent.name), number(path.stem), path) for path in paths)


def new_record(options: argparse.Namespace, name: str) -> JobRecord:
    """The record of a job that is about to start; it is not written yet."""
    _check_name(name)
    kept = {key: value for key, value in vars(options).items() if key not in NOT_KEPT}
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in kept.items()}
    return JobRecord(name=name, backend=options.backend, command=tuple(options.command), options=plain)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ConfigError(
            f"--name is {name!r}; it must be at most 100 letters, digits, '.', '_' and '-', and begin with a letter or "
            "digit."
        )


def name_from_date() -> str:
    """A name for a job that was given none."""
    return time.strftime("job-%Y%m%d-%H%M%S")


def jobs_directory() -> Path:
    """The directory with a directory of each job."""
    return Path(os.environ.get(DIRECTORY) or Path.home() / ".lockstep" / "jobs")


def find_record(name: str) -> JobRecord | None:
    """The record of a job, None where there is none."""
    _check_name(name)
    path = jobs_directory() / name / "job.json"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    place = f"the record of job {name!r}, {path},"
    fix = "Another version of lockstep wrote it, or it was edited; remove it to forget the job."
    fields = parse_json(text, place, dict, fix)
    with refused(place, fix):
        if fields["name"] != name:
            raise ValueError(f"it is of job {fields['name']!r}")
        return typed(JobRecord, fields)


def find_earlier(record: JobRecord) -> JobRecord | None:
    """The record of an earlier job of this name, None where there is none; the name of another backend's is refused."""
    before = find_record(record.name)
    if before is not None and before.backend != record.backend:
        raise ConfigError(
            f"there is a job {record.name!r} with backend {before.backend!r} in {before.directory}. Give this one "
            "another --name."
        )
    return before


def load_record(name: str) -> JobRecord:
    """The record of a job."""
    record = find_record(name)
    if record is None:
        directory = jobs_directory()
        known = sorted(path.parent.name for path in directory.glob("*/job.json"))
        raise ConfigError(
            f"no job {name!r} in {directory}; there is {', '.join(known) if known else 'none'}. Jobs are known on the "
            f"machine that started them (the variable {DIRECTORY} names another directory)."
        )
    return record
