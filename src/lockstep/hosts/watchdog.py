"""A device call that waits for a missing process cannot be interrupted: report what each did, then end the process."""

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator

from lockstep.exits import WATCHDOG
from lockstep.hosts.fault import limit_attempts
from lockstep.hosts.heartbeat import PeerHeartbeat, describe_elsewhere, describe_missing, heartbeats
from lockstep.hosts.hosts import Hosts
from lockstep.hosts.peers import announce_exit, end_process

SHOWN_LAUNCHES = 10
"""Number of last launches in the report."""
REPORT_S = 5.0
"""Seconds that the report may wait for the coordination service."""


class Watchdog:
    """Ends the process, with stacks, last launches and every process's phase, when a block outlives its time.

    One thread serves every ``watch``, so a watch costs microseconds and can surround each device call.

    Args:
        hosts: The processes of the job.
        timeout_s: The time in seconds that a watched block may last.
    """

    def __init__(self, hosts: Hosts, timeout_s: float):
        self._hosts = hosts
        self.timeout_s = timeout_s
        self._watched: tuple[str, float] | None = None  # what, and until when (time.monotonic)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watch the block. Where watches are nested, the inner one counts while it lasts.

        Args:
            what: The name of the block in the report.
        """
        outer = self._watched
        self._watched = (what, time.monotonic() + self.timeout_s)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            self._watched = outer

    @contextlib.contextmanager
    def watch_launch(self, program: str) -> Iterator[None]:
        """Watch a launch and say to the other processes that this one is in it.

        Args:
            program: The name of the program.
        """
        self._hosts.phase(program)
        with self.watch(program):
            yield

    def _run(self) -> None:
        # Every deadline is timeout_s after its watch began, so a check every timeout_s sees it before it has passed:
        # a watch need not wake this thread.
        while True:
            watched = self._watched
            now = time.monotonic()
            if watched is not None and now >= watched[1]:
                end_process(self._report(watched[0]))
            time.sleep(self.timeout_s if watched is None else watched[1] - now)
            with self._lock:
                if watched is None and self._watched is None:
                    self._thread = None  # idle: the next watch starts a new one
                    return

    def _report(self, what: str) -> int:
        """Say what was waited for, and return the exit code."""
        hosts, codes = self._hosts, [WATCHDOG]
        text = f"{what!r} on process {hosts.index} of {hosts.count} did not end within {self.timeout_s:g} s"
        stream = sys.__stderr__ or sys.stderr
        peers: dict[int, PeerHeartbeat] = {}
        self._call_with_deadline(lambda: peers.update(heartbeats(hosts.client)))
        text += f".{describe_missing(peers)}{describe_elsewhere(peers, hosts.last_phase)}"
        print(f"\nlockstep watchdog: {text} Every process, as it was last heard of:", file=stream)
        for process in range(hosts.count):
            print(f"  process {process}: {peers.get(process, 'never heard of')}", file=stream)
        launches = [f"{index} {name!r} ({digest})" for index, name, digest in hosts.ledger.last(SHOWN_LAUNCHES)]
        print(f"lockstep watchdog: last launches here: {', '.join(launches) or 'none'}", file=stream)
        print("lockstep watchdog: the stacks of this process:", file=stream, flush=True)
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=stream, all_threads=True)
        self._call_with_deadline(lambda: codes.append(limit_attempts(hosts.client, WATCHDOG)))
        print(f"lockstep watchdog: ending with code {codes[-1]}", file=stream, flush=True)
        self._call_with_deadline(announce_exit, hosts.client, text)
        return codes[-1]

    def _call_with_deadline(self, function: Callable[..., None], *args: object) -> None:
        """Call what needs the coordination service, which may be the very thing that hangs, for at most `REPORT_S`."""
        helper = threading.Thread(target=function, args=args, daemon=True)
        helper.start()
        helper.join(REPORT_S)
