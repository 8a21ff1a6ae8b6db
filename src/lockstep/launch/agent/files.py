"""The files of an attempt on a worker, and their names.

``~/.lockstep/work/JOB/worker-I/`` has a directory of each attempt, with what is listed here.
"""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

LOCK = "lock"
"""Locked by the supervisor as long as it lives: the kernel gives it back however it ends."""
LOG = "log"
"""What the command has printed, without secrets."""
EXIT = "exit.json"
"""How the command has ended; written when it and everything it started is gone and the log is whole."""
STATE = "state.json"
"""The process number of the command and when it began."""
LEASE = "lease"
"""Its time of change is when the launcher was last heard of."""
STOP = "stop"
"""``stop`` or ``kill``: what the launcher asks for."""


def write_whole(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file, whole or not at all."""
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: str, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(value).encode())


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
        descriptor = os.open(os.path.join(directory, LOCK), os.O_RDWR)
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
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
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
