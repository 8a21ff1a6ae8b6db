"""A device call that waits for a missing process cannot be interrupted: report what each did, then end the process."""

import contextlib
import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator

from lockstep.errors import HostError
from lockstep.exits import PEER_FAILED, WATCHDOG
from lockstep.hosts.fault import limit_attempts
from lockstep.hosts.heartbeat import PeerHeartbeat, describe_elsewhere, describe_missing, heartbeats
from lockstep.hosts.hosts import Hosts
from lockstep.hosts.peers import announce_exit, end_process
from lockstep.json_text import typed
from lockstep.printable import error_text, print_to_stderr, printable

SHOWN_LAUNCHES = 10  # number of last launches in the report
LOOK_S = 2.0  # seconds in a block after which it is asked whether another process has failed in it
FAILED_LAUNCH = "lockstep/failed launch"
"""Key with the last launch that failed on some process: its number, the launch, that of the ledger, and the error."""
REPORT_S = 5.0  # seconds that the report may wait for the coordination service


class Watchdog:
    """Ends the process, with stacks, last launches and every process's phase, when a block outlives its time.

    One thread serves every ``watch``, so a watch costs microseconds and can surround each device call.
    """

    def __init__(self, hosts: Hosts, timeout_s: float):
        self._hosts = hosts
        self.timeout_s = timeout_s
        self._watched: tuple[str, float] | None = None  # what, and until when (time.monotonic)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watch(self, launch: str) -> Iterator[None]:
        """Watch the block. Where watches are nested, the inner one counts while it lasts."""
        outer = self._watched
        self._watched = (launch, time.monotonic() + self.timeout_s)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        except Exception as error:
            self._say_failed(launch, error)
            raise
        finally:
            self._watched = outer

    @contextlib.contextmanager
    def watch_launch(self, program: str) -> Iterator[None]:
        """Watch a launch and say to the other processes that this one is in it."""
        self._hosts.phase(program)
        with self.watch(program):
            yield

    def _run(self) -> None:
        # Every deadline is timeout_s after its watch began, so a check every timeout_s sees it before it has passed:
        # a watch need not wake this thread.
        interval_s = self.timeout_s if self._hosts.count == 1 else min(LOOK_S, self.timeout_s)
        before = None
        while True:
            watched = self._watched
            now = time.monotonic()
            if watched is not None and now >= watched[1]:
                end_process(self._report(watched[0]))
            if watched is not None and watched is before and self._hosts.count > 1:
                self._call_with_deadline(self._end_if_failed, watched[0])
            before = watched
            time.sleep(interval_s if watched is None else min(interval_s, watched[1] - now))
            with self._lock:
                if watched is None and self._watched is None:
                    self._thread = None  # idle: the next watch starts a new one
                    return

    def _say_failed(self, launch: str, error: Exception) -> None:
        """Tell the others that this process is not in a launch: where they are, they wait for it in vain."""
        hosts = self._hosts
        if hosts.count > 1:
            with contextlib.suppress(HostError, TimeoutError):
                words = [hosts.index, launch, hosts.ledger.count, error_text(error)]
                hosts.client.set(FAILED_LAUNCH, json.dumps(words).encode())

    def _end_if_failed(self, launch: str) -> None:
        """End this process where another one has failed in the launch that this one has been in for a while."""
        hosts = self._hosts
        with contextlib.suppress(HostError, TimeoutError, ValueError, TypeError, RecursionError):
            process, failed, count, text = typed(
                tuple[int, str, int, str], json.loads(hosts.client.peek(FAILED_LAUNCH) or b"")
            )
            if (failed, count) == (launch, hosts.ledger.count):
                reason = f"in {launch!r}, in which process {process} failed by itself: {printable(text)}"
                print_to_stderr(f"lockstep: process {hosts.index} ends: it waits {reason}")
                announce_exit(hosts.client, reason)
                end_process(PEER_FAILED)

    def _report(self, launch: str) -> int:
        """Say what was waited for, and return the exit code."""
        hosts, codes = self._hosts, [WATCHDOG]
        text = f"{launch!r} on process {hosts.index} of {hosts.count} did not end within {self.timeout_s:g} s"
        stream = sys.__stderr__ or sys.stderr
        peers: dict[int, PeerHeartbeat] = {}
        self._call_with_deadline(lambda: peers.update(heartbeats(hosts.client)))
        text += f".{describe_missing(peers)}{describe_elsewhere(peers, hosts.last_phase)}"
        print_to_stderr(f"\nlockstep watchdog: {text} Every process, as it was last heard of:", stream=stream)
        for process in range(hosts.count):
            print_to_stderr(f"  process {process}: {peers.get(process, 'never heard of')}", stream=stream)
        launches = [f"{index} {name!r} ({digest})" for index, name, digest in hosts.ledger.last(SHOWN_LAUNCHES)]
        print_to_stderr(f"lockstep watchdog: last launches here: {', '.join(launches) or 'none'}", stream=stream)
        print_to_stderr("lockstep watchdog: the stacks of this process:", stream=stream)
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=stream, all_threads=True)
        self._call_with_deadline(lambda: codes.append(limit_attempts(hosts.client, WATCHDOG)))
        print_to_stderr(f"lockstep watchdog: ending with code {codes[-1]}", stream=stream)
        self._call_with_deadline(announce_exit, hosts.client, text)
        return codes[-1]

    def _call_with_deadline(self, function: Callable[..., None], *args: object) -> None:
        """Call what needs the coordination service, which may be the very thing that hangs, for at most `REPORT_S`."""
        helper = threading.Thread(target=function, args=args, daemon=True)
        helper.start()
        helper.join(REPORT_S)
