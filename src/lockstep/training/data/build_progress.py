"""How far the hosts are with a cache, as the user of the leader sees it: a bar at a terminal, lines in a log."""

import time
from collections.abc import Sequence

import rich
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.credentials import get_logger
from lockstep.hosts import Hosts
from lockstep.units import bytes_text

FIRST_S, INTERVAL_S = 2.0, 10.0
"""Seconds until the first line or the bar, so that small data passes in silence, and between two lines."""

log = get_logger(__name__)


class BuildProgress:
    """Shows how much of its files the hosts have read; on the leader alone.

    Args:
        hosts: The hosts that build together.
        total: The bytes that all of them read.
    """

    def __init__(self, hosts: Hosts, total: int) -> None:
        self._hosts, self._total = hosts, max(total, 1)
        self._start = time.monotonic()
        self._next = self._start + FIRST_S
        self._bar: Progress | None = None

    def show(self, parts: Sequence[tuple[int, int]]) -> None:
        """Show what the hosts have read.

        Args:
            parts: The bytes that each host has read, and how many it has to read, by process number.
        """
        read = sum(done for done, _ in parts)
        self._hosts.phase(f"building the data cache, {read / self._total:.0%}")
        now = time.monotonic()
        if not self._hosts.is_leader or now < self._next:
            return
        if rich.get_console().is_terminal:
            self._show_bar(read)
            return
        self._next = now + INTERVAL_S
        rate = bytes_text(round(read / (now - self._start)))
        last = min(range(len(parts)), key=lambda process: parts[process][0] / max(parts[process][1], 1))
        share = parts[last][0] / max(parts[last][1], 1)
        log.info(
            "data cache: %s of %s read, %s/s; process %d is last with %.0f%%",
            bytes_text(read),
            bytes_text(self._total),
            rate,
            last,
            100 * share,
        )

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()

    def _show_bar(self, read: int) -> None:
        if self._bar is None:
            columns = TextColumn("data cache"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=rich.get_console())
            self._bar.add_task("data cache", total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=read)
