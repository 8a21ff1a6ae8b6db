"""What the hosts of a job hear of each other while they read a checkpoint, and what the leader logs of it."""

import time
from collections.abc import Callable, Sequence

from lockstep.credentials import get_logger
from lockstep.hosts import Hosts
from lockstep.printable import bytes_text

type OnRead = Callable[[int, int], None]
"""Takes the bytes that this host has just read, and those that it will read in all."""

LOG_INTERVAL_S = 5.0
"""Seconds between two lines of the log about loading."""

log = get_logger(__name__)


class LoadProgress:
    """Counts bytes as they are read; the leader logs how many, how fast, and who is last.

    Args:
        hosts: The hosts that load together.
        total: The bytes that this host will read in all.
        on_read: The function that is called with the bytes that were read; None for none.
    """

    def __init__(self, hosts: Hosts, total: int, on_read: OnRead | None) -> None:
        self._hosts, self._total, self._on_read = hosts, total, on_read
        self._bytes = 0
        self._start = self._last = time.monotonic()
        self._done = False

    def note(self, bytes_read: int) -> float:
        """Takes the bytes that this host has read so far; returns which part of all of its bytes that is."""
        if self._on_read is not None and bytes_read > self._bytes:
            self._on_read(bytes_read - self._bytes, self._total)
        self._bytes = bytes_read
        self._hosts.phase(f"loading the checkpoint, {bytes_text(bytes_read)} of {bytes_text(self._total)} read")
        return bytes_read / self._total if self._total else 1.0

    def show(self, parts: Sequence[float]) -> None:
        """Logs, on the leader and every few seconds, what this host has read and the part of the last host.

        Args:
            parts: The part of its bytes that each host has read, by process number.
        """
        now, slowest = time.monotonic(), min(range(len(parts)), key=lambda process: parts[process])
        done = parts[slowest] >= 1.0
        if not self._hosts.is_leader or self._done or (now - self._last < LOG_INTERVAL_S and not done):
            return
        self._last, self._done = now, done
        rate = bytes_text(round(self._bytes / max(now - self._start, 1e-9)))
        last = f"; process {slowest} is last with {parts[slowest]:.0%}" if not done else ""
        log.info("loading: %s of %s on this host, %s/s%s", bytes_text(self._bytes), bytes_text(self._total), rate, last)
