"""Ending this process soon after another one fails, or aborts it, whatever it waits for: within seconds."""

import atexit
import collections
import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from lockstep.errors import HostError
from lockstep.exits import DONE, EXIT_CODES, PEER_FAILED, finish_work
from lockstep.hosts._client import Client, ServiceGoneError, service_address
from lockstep.hosts.exchange import digest, name_processes
from lockstep.hosts.heartbeat import MISSING
from lockstep.hosts.hosts import Hosts
from lockstep.hosts.liveness import DIED, Connection, Listener
from lockstep.printable import print_to_stderr, printable, without_secrets

ANNOUNCEMENTS = "lockstep/failed"
"""Directory of the reasons, exit codes and numbers that ending processes announce, by task of the service."""
ANNOUNCED = 16  # processes that announce the same reason; the others leave theirs, which nobody reads, in `UNTOLD`
UNTOLD = "lockstep/untold"
COUNTS = "lockstep/failures"  # directory of the number of processes that have each reason, and of all that have any
WAKE_UPS = "lockstep/call"
"""Directory of the keys for which the processes wait, each for its own: set once there is an announcement."""
DEPARTURES = "lockstep/left"  # directory with a key for each process that is about to end
GRACE_S = 2.0  # seconds that a process has to report its own error after another one announced a failure
REQUEST_S = 3600.0  # seconds that one request to the service waits for the wake-up key; then the next request does
STOP_S = 5.0  # seconds in which the service answers what threads have asked it, before this process ends
ORDERLY_S = 0.02
"""Seconds after the end of the service within which this process leaves it too, where the job ended in order."""
MAX_TEXT = 2000  # characters of the reason that a process announces
LAST_WORD_S = 2.0  # seconds in which a thread that has begun to end this process does so
SHOWN_LAUNCHES = 3  # launches that are named when the process that runs the service has died

_ending = threading.Lock()  # taken by the thread that says why the process ends, and never given back


def announce_exit(client: Client, reason: str, code: int = PEER_FAILED, work_s: float = 0.0) -> None:
    """Announce to every process of the job that this one ends, and why, just before it does.

    Args:
        reason: What the others print; where this process failed, after the word "failed".
        work_s: The seconds that work behind queues has, at most, while the others end.
    """
    text = without_secrets(f"failed: {reason}" if code == PEER_FAILED else reason)[:MAX_TEXT]
    with contextlib.suppress(HostError, TimeoutError):
        # All may fail at once: the first one wakes the others, and a reason that many have is posted by a few of them.
        told = client.increment(f"{COUNTS}/{digest(text, str(code))}") > ANNOUNCED
        client.set(
            f"{UNTOLD if told else ANNOUNCEMENTS}/{client.task}", json.dumps([text, code, client.index]).encode()
        )
        if client.increment(f"{COUNTS}/all") == 1:
            for task in range(client.count):
                client.set(f"{WAKE_UPS}/{task}", b"")
    finish_work(work_s)  # after the words to the others, and before this process waits for them to end first
    _mark_departure(client)


def failure_is_announced(client: Client) -> bool:
    """Whether another process of the job has announced that it failed."""
    with contextlib.suppress(HostError, TimeoutError):
        announced = client.get_dir(ANNOUNCEMENTS)
        announced.pop(f"{ANNOUNCEMENTS}/{client.task}", None)
        return any(_announcement(value)[1] == PEER_FAILED for value in announced.values())
    return False


def _mark_departure(client: Client) -> None:
    """Publish that this process is about to end. The one with which the service ends waits for the others to do so.

    Otherwise they would be aborted, with a page of C++ stacks each. It waits a second longer than ``GRACE_S``.
    """
    with contextlib.suppress(HostError, TimeoutError):
        client.set(f"{DEPARTURES}/{client.task}", b"")
        if client.task != 0:
            return
        deadline = time.monotonic() + GRACE_S + 1.0
        while len(client.get_dir(DEPARTURES)) < client.count and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)  # a process marks its departure a moment before it ends


def watch_peers(hosts: Hosts) -> Callable[[], None]:
    """Start threads that end this process soon after another one has announced that it ends, or the service is gone.

    This process's heartbeat starts too. What is returned stops watching; Python's exit calls it too.
    """
    client, stopping, stop_heartbeat = hosts.client, threading.Event(), hosts.start_heartbeat()
    if client.task == 0:
        listener = Listener(client, functools.partial(_announce_lost, hosts), stopping)
        listener.start()
        missing = listener.missing
        end_without_service = functools.partial(_end_without_service, hosts, stopping, list)
    else:
        connection = Connection(client, stopping)
        missing = connection.missing
        end_without_service = functools.partial(_end_without_service, hosts, stopping, connection.unheard)

        def watch_service() -> None:
            # JAX notices at the same moment, and its requests fail in any order: `_watch` often has no time to print.
            if ended := connection.wait():
                end_without_service(ended)

        threading.Thread(target=watch_service, name="lockstep-service", daemon=True).start()
    forget_abort = on_abort(functools.partial(_last_word, hosts, missing))
    watch = threading.Thread(
        target=_watch, args=(hosts, stopping, end_without_service), name="lockstep-peers", daemon=True
    )
    watch.start()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            with contextlib.suppress(HostError, TimeoutError):
                client.set(f"{WAKE_UPS}/{client.task}", b"")
            stop_heartbeat()
            client.close(STOP_S)
            forget_abort()

    atexit.register(stop)
    return stop


def _watch(hosts: Hosts, stopping: threading.Event, end_without_service: Callable[[str], None]) -> None:
    """End this process once another one has announced that it ends."""
    client = hosts.client
    try:
        _wait_for_wake_up(client)
        announced = client.get_dir(ANNOUNCEMENTS)
    except ServiceGoneError:
        end_without_service(DIED)
        return
    except (HostError, TimeoutError):
        return  # the service was ended in order
    if f"{ANNOUNCEMENTS}/{client.task}" in announced or stopping.wait(GRACE_S):
        return
    with contextlib.suppress(HostError, TimeoutError):
        if client.peek(f"{UNTOLD}/{client.task}") is not None:
            return
    reasons, code = _summarize(announced.values())
    for reason in reasons:
        print_to_stderr(f"lockstep: process {client.index} ends because {reason}")
    _mark_departure(client)
    end_process(code)


def _summarize(announced: Iterable[bytes]) -> tuple[list[str], int]:
    """Return each announced reason once, with all processes that announced it, and the exit code of this process."""
    by_text: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    codes = []
    for value in announced:
        text, code, index = _announcement(value)
        by_text[text].append(index)
        codes.append(code)
    reasons = [f"{name_processes(processes)} {text}" for text, processes in by_text.items()]
    return reasons, PEER_FAILED if PEER_FAILED in codes else codes[0]


def _announcement(value: bytes) -> tuple[str, int, int]:
    """Reason, exit code and number of a process. Whoever reaches the service can post: nothing is taken for success."""
    try:
        text, code, index = json.loads(value)
        if not (isinstance(text, str) and isinstance(code, int) and isinstance(index, int)):
            raise ValueError("of another kind")
    except (ValueError, TypeError, RecursionError):
        text, code, index = "posted an announcement that cannot be read", PEER_FAILED, -1
    return printable(text[:MAX_TEXT]), code if code in EXIT_CODES and code != DONE else PEER_FAILED, index


def _wait_for_wake_up(client: Client) -> None:
    """Wait in one request that the service answers when the key is set, so that waiting costs the service nothing."""
    while True:
        with contextlib.suppress(TimeoutError):
            client.get(f"{WAKE_UPS}/{client.task}", REQUEST_S)
            return


def _announce_lost(hosts: Hosts, task: int, last: str) -> None:
    """Announce in the place of a process that is gone that it is."""
    client = hosts.client
    text = f"has died: its connection to process {client.index} has ended, and it gives no sign of life"
    if last:
        text += f" ({last})"
    if f"{DEPARTURES}/{task}" in client.get_dir(DEPARTURES):
        return
    client.set(f"{ANNOUNCEMENTS}/{task}", json.dumps([text, PEER_FAILED, client.processes[task]]).encode())
    for process in range(client.count):
        client.set(f"{WAKE_UPS}/{process}", b"")


def _last_word(hosts: Hosts, missing: Callable[[], str]) -> bool:
    """Say which processes are missing as JAX aborts this one; False where none is known to be."""
    if not (text := missing()):
        return False
    if not _ending.acquire(blocking=False):
        time.sleep(LAST_WORD_S)  # another thread says so, and ends the process
        return True
    print_to_stderr(
        f"lockstep: process {hosts.index} of {hosts.count} ends because JAX gave up on a process of the job. "
        f"{MISSING}{text}. This process was in phase {hosts.last_phase!r}; its last launches: {_last_launches(hosts)}."
    )
    end_process(PEER_FAILED)


def _last_launches(hosts: Hosts) -> str:
    return ", ".join(f"{index} {name!r}" for index, name, _ in hosts.ledger.last(SHOWN_LAUNCHES)) or "none"


def _end_without_service(hosts: Hosts, stopping: threading.Event, unheard: Callable[[], list[str]], ended: str) -> None:
    """End this process before JAX aborts it with a page of C++ stacks; do nothing where the job ended in order.

    Args:
        unheard: Returns the processes of which nothing was heard before, as text.
        ended: How the process with the service ended, as what follows its name.
    """
    if stopping.wait(ORDERLY_S) or service_address() is None or not _ending.acquire(blocking=False):
        return
    lost = hosts.client.processes[0]
    missing = ", ".join([*unheard(), f"process {lost}"])
    print_to_stderr(
        f"lockstep: process {hosts.index} of {hosts.count} ends because process {lost} {ended}. "
        f"{MISSING}{missing}. This process was in phase {hosts.last_phase!r}; its last launches: "
        f"{_last_launches(hosts)}. Look for the log that ends without an error."
    )
    end_process(PEER_FAILED)


def end_process(code: int) -> NoReturn:
    """Flush what was printed and end at once, without exit handlers, which could wait for other processes.

    Work behind queues that is lost, such as reports, is named.
    """
    for text in finish_work(0.0):
        with contextlib.suppress(Exception):
            print_to_stderr(f"lockstep: {text}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


LIMIT_S = 5.0  # seconds that the last word may take


def on_abort(last_word: Callable[[], bool]) -> Callable[[], None]:
    """Have a function called when this process is aborted, in whichever thread that is.

    JAX's coordination client calls ``abort`` in a thread of C++, with a page of stacks and without a word of which
    process is missing; a handler of Python's ``signal`` runs in the main thread alone, which waits for a device.

    Args:
        last_word: Returns True where the abort comes of another process; the exit code is then `PEER_FAILED`. False:
            the process ends by SIGABRT, after the handler that it had before.

    Returns:
        A function that takes the handler away.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]

    def handle(_: int) -> None:
        limit = threading.Timer(LIMIT_S, os._exit, (PEER_FAILED,))
        limit.daemon = True
        limit.start()
        if last_word():
            os._exit(PEER_FAILED)
        limit.cancel()
        restore()
        signal.pthread_kill(threading.get_ident(), signal.SIGABRT)  # this thread's, which has it once it returns

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

    def restore() -> None:
        libc.signal(signal.SIGABRT, before)

    _kept.append(handler)  # for good: it may be running when it is taken away
    return restore


_kept: list[object] = []
