"""One connection of the launcher: the log from a byte on, signs of life both ways, and how the command ended."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from lockstep.launch.agent import files
from lockstep.launch.agent.supervisor import start

POLL_S = 0.1
"""Seconds between two looks at the log."""
BEAT_S = 2.0
"""Seconds between two signs of life of this connection."""
PIECE = 1 << 16
"""Bytes of the log in one frame at most."""


def send(kind: str, data: bytes | None = None) -> None:
    """Send a frame: a letter, the length of what follows, and that; without length where nothing does."""
    head = kind if data is None else f"{kind} {len(data)}"
    sys.stdout.buffer.write(head.encode() + b"\n" + (data or b""))
    sys.stdout.buffer.flush()


def send_result(result: dict[str, Any]) -> None:
    """Send the last frame of a connection."""
    send("R", json.dumps(result).encode())


def follow(directory: str, request: dict[str, Any]) -> None:
    """Start the attempt where that is asked and it is not there, and send its log until it has ended.

    Args:
        directory: The attempt's directory.
        request: ``start`` (the specification, or None), ``offset`` in bytes, ``wait`` (False: what there is now).
    """
    if request["start"] is not None:
        start(directory, request["start"])
        send("S")
    elif not os.path.isdir(directory):
        send_result({"state": "absent"})
        return
    threading.Thread(target=_obey, args=(directory,), daemon=True).start()
    offset, beat = request["offset"], 0.0
    log = os.path.join(directory, files.LOG)
    while True:
        state = look(directory)  # before the log is read: what ended has written all of it
        while True:
            piece = _read(log, offset)
            if not piece:
                break
            send("O", piece)
            offset += len(piece)
        if state["state"] != "running" or not request["wait"]:
            send_result(state)
            return
        if time.monotonic() - beat > BEAT_S:
            send("H")
            beat = time.monotonic()
        time.sleep(POLL_S)


def look(directory: str) -> dict[str, Any]:
    """The state of an attempt: absent, running, ended (with its code), or lost: its supervisor was killed."""
    if not os.path.isdir(directory):
        return {"state": "absent"}
    locked = files.is_locked(directory)  # before the note is read, which is written with the lock taken
    ended = files.read_json(os.path.join(directory, files.EXIT))
    if ended is not None:
        return dict(ended, state="ended")
    return dict(files.read_json(os.path.join(directory, files.STATE)) or {}, state="running" if locked else "lost")


def ask(directory: str, what: str) -> None:
    """Ask the supervisor for ``stop`` or ``kill``; a kill is not taken back by a stop."""
    path = os.path.join(directory, files.STOP)
    if what == "stop" and os.path.exists(path):
        return
    files.write_whole(path, what.encode())


def _read(log: str, offset: int) -> bytes:
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            return file.read(PIECE)
    except FileNotFoundError:
        return b""


def _obey(directory: str) -> None:
    """Do what comes over the connection; when it is gone, so is this process, and nothing renews the lease."""
    for line in sys.stdin.buffer:
        word = line.strip().decode(errors="replace")
        if word == "renew":
            try:
                os.utime(os.path.join(directory, files.LEASE))
            except FileNotFoundError:
                pass
        elif word in ("stop", "kill"):
            ask(directory, word)
    os._exit(0)
