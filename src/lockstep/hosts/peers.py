"""Hearing of another process's failure, wherever this process is, so that the job ends within seconds."""

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from lockstep.errors import HostError
from lockstep.hosts._client import Client, ServiceGoneError, service_address
from lockstep.hosts.hosts import Hosts

FAILED = "lockstep/failed"
CALLS = "lockstep/call"
LEFT = "lockstep/left"
GRACE_S = 2.0
"""Seconds that a process has to report its own error after it hears of another's failure."""
LISTEN_S = 3600.0
"""Seconds that one request to the service waits for a call; then the next one does."""
STOP_S = 1.0
"""Seconds that the end of listening may take."""
ORDERLY_S = 0.02
"""Seconds after the end of the service within which this process leaves it too, where it was ended in order."""
CONNECT_S = 10.0
"""Seconds that connecting to process 0 may take."""
SHOWN_LAUNCHES = 3
"""Launches that are named when process 0 has died."""
PEER_FAILED_EXIT_CODE = 85
"""Exit code of a process that ends because another one failed."""


def announce_exit(client: Client, reason: str, code: int = PEER_FAILED_EXIT_CODE) -> None:
    """Let every process of the job know that this one ends, and why, just before it does.

    Args:
        client: the coordination service.
        reason: what the others print; where this process failed, after the word "failed".
        code: with which the others end; any but that of a failure where this process did not fail.
    """
    words = f"failed: {reason}" if code == PEER_FAILED_EXIT_CODE else reason
    with contextlib.suppress(HostError, TimeoutError):
        client.set(f"{FAILED}/{client.index}", json.dumps([words[:2000], code]).encode())
        for process in range(client.count):
            client.set(f"{CALLS}/{process}", b"")
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


def watch_peers(hosts: Hosts) -> Callable[[], None]:
    """Start threads that end this process soon after another one has said that it fails, or when process 0 is gone.

    Another one shows the others that this process lives.

    Returns:
        A function that stops watching; it is also called when Python exits.
    """
    client, stopping, stop_heart = hosts.client, threading.Event(), hosts.beat()
    thread = threading.Thread(target=_watch, args=(hosts, stopping), name="lockstep-peers", daemon=True)
    thread.start()
    if client.index != 0:
        threading.Thread(target=_watch_leader, args=(hosts, stopping), name="lockstep-leader", daemon=True).start()

    def stop() -> None:
        # A thread inside a call of the service while the interpreter goes down would abort the process.
        if not stopping.is_set():
            stopping.set()
            with contextlib.suppress(HostError, TimeoutError):
                client.set(f"{CALLS}/{client.index}", b"")
            thread.join(STOP_S)
            stop_heart()

    atexit.register(stop)
    return stop


def _watch(hosts: Hosts, stopping: threading.Event) -> None:
    client = hosts.client
    try:
        _wait_for_call(client)
        failed = client.get_dir(FAILED)
    except ServiceGoneError:
        _end_without_leader(hosts, stopping)
        return
    except (HostError, TimeoutError):
        return  # the service was ended in order
    if f"{FAILED}/{client.index}" in failed or stopping.wait(GRACE_S):
        return
    codes = []
    for key, told in failed.items():
        words, code = json.loads(told)
        codes.append(code)
        print(
            f"lockstep: process {client.index} ends because process {key.rpartition('/')[2]} {words}", file=sys.stderr
        )
    _go(client)
    end_process(PEER_FAILED_EXIT_CODE if PEER_FAILED_EXIT_CODE in codes else codes[0])


def _wait_for_call(client: Client) -> None:
    """One request that the service answers when there is news, so that waiting costs it nothing."""
    while True:
        with contextlib.suppress(TimeoutError):
            client.get(f"{CALLS}/{client.index}", LISTEN_S)
            return


def _watch_leader(hosts: Hosts, stopping: threading.Event) -> None:
    """Hear of the end of process 0 from the system, which closes its connections.

    Nothing is said on this connection, so the service closes it now and then; only when it can no longer be made is
    process 0 gone. JAX hears of it at the same moment, and its requests fail in any order: the thread in `_watch` is
    often too late to say a word.
    """
    host, _, port = (service_address() or "").rpartition(":")
    try:
        while True:
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as connection:
                connection.settimeout(None)
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(4096):
                        pass  # the service's greeting
    except ConnectionRefusedError:
        _end_without_leader(hosts, stopping)
    except (OSError, ValueError):
        return  # not reachable from here, which says nothing of process 0


def _end_without_leader(hosts: Hosts, stopping: threading.Event) -> None:
    """End this process before JAX does, with a page of C++ stacks; nothing where the service was ended in order."""
    if stopping.wait(ORDERLY_S) or service_address() is None:
        return
    launches = [f"{index} {name!r}" for index, name, _ in hosts.ledger.last(SHOWN_LAUNCHES)]
    print(
        f"lockstep: process {hosts.index} of {hosts.count} ends because process 0 has died, and with it the "
        f"coordination service. Missing: process 0. This process was in phase {hosts.last_phase!r}; its last launches: "
        f"{', '.join(launches) or 'none'}. Look for the log that ends without an error.",
        file=sys.stderr,
    )
    end_process(PEER_FAILED_EXIT_CODE)


def end_process(code: int) -> NoReturn:
    """Flush what was printed and end at once, without exit handlers, which could wait for other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
