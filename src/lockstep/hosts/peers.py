"""Hearing of another process's failure, wherever this process is, so that the job ends within seconds."""

import atexit
import contextlib
import json
import os
import sys
import threading
from typing import NoReturn

from lockstep.errors import HostError
from lockstep.hosts._client import Client

FAILED = "lockstep/failed"
LEFT = "lockstep/left"
GRACE_S = 2.0
"""Seconds that a process has to report its own error after it hears of another's failure."""
POLL_S = 0.5
"""Seconds between two looks for a failure."""
PEER_FAILED_EXIT_CODE = 85
"""Exit code of a process that ends because another one failed."""


def tell_peers(client: Client, reason: str) -> None:
    """Let every process of the job know that this one fails, and why."""
    client.set(f"{FAILED}/{client.index}", json.dumps(reason[:2000]).encode())


def watch_peers(client: Client) -> threading.Thread:
    """Start a thread that ends this process soon after another one has said that it fails."""
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(client, stop), name="lockstep-peers", daemon=True)
    thread.start()

    @atexit.register
    def _() -> None:
        # A thread inside a call of the service while the interpreter goes down would abort the process.
        stop.set()
        thread.join(POLL_S)

    return thread


def _watch(client: Client, stop: threading.Event) -> None:
    failed: dict[str, bytes] = {}
    while not failed:
        if stop.wait(POLL_S):
            return
        try:
            failed = client.get_dir(FAILED)
        except (HostError, TimeoutError):
            return  # the service has ended, and with it the job
    if f"{FAILED}/{client.index}" in failed or stop.wait(GRACE_S):
        return
    for key, reason in failed.items():
        text = f"process {client.index} ends because process {key.rpartition('/')[2]} failed: {json.loads(reason)}"
        print(f"lockstep: {text}", file=sys.stderr)
    with contextlib.suppress(HostError, TimeoutError):
        client.set(f"{LEFT}/{client.index}", b"")
    end_process(PEER_FAILED_EXIT_CODE)


def end_process(code: int) -> NoReturn:
    """Flush what was printed and end at once, without exit handlers, which could wait for other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
