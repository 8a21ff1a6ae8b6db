"""Hearing of another process's failure, wherever this process is, so that the job ends within seconds."""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
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


def say_goodbye(client: Client, reason: str) -> None:
    """Let every process of the job know that this one fails, and why, just before it ends.

    Args:
        client: the coordination service.
        reason: what the others print.
    """
    with contextlib.suppress(HostError, TimeoutError):
        client.set(f"{FAILED}/{client.index}", json.dumps(reason[:2000]).encode())
    _go(client)


def _go(client: Client) -> None:
    """Say that this process ends now. The leader, with whom the service ends, first lets the others go.

    Without that they would be aborted, with a page of C++ stacks each. It waits a second longer than ``GRACE_S``.
    """
    with contextlib.suppress(HostError, TimeoutError):
        client.set(f"{LEFT}/{client.index}", b"")
        if client.index != 0:
            return
        deadline = time.monotonic() + GRACE_S + 1.0
        while len(client.get_dir(LEFT)) < client.count and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)  # between a process's word and its end


def watch_peers(client: Client) -> Callable[[], None]:
    """Start a thread that ends this process soon after another one has said that it fails.

    Returns:
        A function that stops watching; it is also called when Python exits.
    """
    stopping = threading.Event()
    thread = threading.Thread(target=_watch, args=(client, stopping), name="lockstep-peers", daemon=True)
    thread.start()

    def stop() -> None:
        # A thread inside a call of the service while the interpreter goes down would abort the process.
        stopping.set()
        thread.join(POLL_S)

    atexit.register(stop)
    return stop


def _watch(client: Client, stopping: threading.Event) -> None:
    failed: dict[str, bytes] = {}
    while not failed:
        if stopping.wait(POLL_S):
            return
        try:
            failed = client.get_dir(FAILED)
        except (HostError, TimeoutError):
            return  # the service has ended, and with it the job
    if f"{FAILED}/{client.index}" in failed or stopping.wait(GRACE_S):
        return
    for key, reason in failed.items():
        text = f"process {client.index} ends because process {key.rpartition('/')[2]} failed: {json.loads(reason)}"
        print(f"lockstep: {text}", file=sys.stderr)
    _go(client)
    end_process(PEER_FAILED_EXIT_CODE)


def end_process(code: int) -> NoReturn:
    """Flush what was printed and end at once, without exit handlers, which could wait for other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
