"""Reads what the processes of a run record while they write it, and compares it."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lockstep.check.alone import ProcessChecks
from lockstep.check.compare import End, LaunchComparison
from lockstep.check.differences import PutComparison
from lockstep.check.findings import Finding, Findings
from lockstep.check.log import Event, Launch, LogReader, ProcessLog, Put

AHEAD = 10_000
"""Launches that one process may be ahead of another before its file is left alone until the other has caught up."""
UNDECIDED_S = 2.0  # seconds that a difference stands before it is told, though what follows it is not known yet


class Follower:
    """Compares processes as they go on. What it keeps grows with their programs and lines, not with their launches.

    Args:
        on_finding: Is called with a finding when it is seen first, before the end of the run.
    """

    def __init__(self, directory: Path, processes: int, on_finding: Callable[[Finding], None]) -> None:
        texts: dict[str, str] = {}
        self._readers = [LogReader(directory / f"process-{index}.jsonl", index, texts) for index in range(processes)]
        self._alone = [ProcessChecks(log) for log in self.logs]
        first, *others = self.logs
        self._pairs = [_Pair(first, other) for other in others]
        self._findings = Findings()
        self._on_finding = on_finding
        self._reported: set[tuple[str, str]] = set()
        self._looked = time.monotonic()

    @property
    def logs(self) -> Sequence[ProcessLog]:
        """The log of each process."""
        return [reader.log for reader in self._readers]

    def read(self) -> None:
        """Compare what was written since."""
        self._read(AHEAD)
        now = time.monotonic()
        if now - self._looked < UNDECIDED_S:
            return
        self._looked = now
        for pair in self._pairs:
            for finding in pair.undecided(now):
                self._report_once(finding)

    def waits(self) -> bool:
        """Whether processes that launch nothing wait in vain; not where one compiles, loads or computes."""
        if any(there.compiling for log in self.logs for there in log.where.values()):
            return False
        alive = [log for log in self.logs if not log.ended]
        if alive and all(log.waits_for_devices for log in alive):
            return True
        return any(finding.kind == "some_enter" for pair in self._pairs for finding in pair.rest(End.HUNG))

    def finish(self, end: End) -> list[Finding]:
        """All that is wrong."""
        self._read(None)
        for pair in self._pairs:
            for finding in pair.rest(end):
                self._findings.add(finding)
        for alone in self._alone:
            for finding in alone.rest():
                self._findings.add(finding)
        return list(self._findings)

    def _read(self, ahead: int | None) -> None:
        goes_on = True
        while goes_on:
            goes_on = False
            for index, reader in enumerate(self._readers):
                pairs = self._pairs[index - 1 : index] if index else self._pairs
                if ahead is not None and any(pair.ahead(index) > ahead for pair in pairs):
                    continue
                events = reader.read()
                goes_on = goes_on or bool(events)
                self._take(index, pairs, events)

    def _take(self, index: int, pairs: "Sequence[_Pair]", events: Sequence[Event]) -> None:
        found = [finding for event in events for finding in self._alone[index].see(event)]
        for pair in pairs:
            found += pair.add(index, events)
        for finding in found:
            if self._findings.add(finding):
                self._report_once(finding)

    def _report_once(self, finding: Finding) -> None:
        if finding.key not in self._reported:
            self._reported.add(finding.key)
            self._on_finding(finding)


class _Pair:
    """The comparisons of two processes."""

    def __init__(self, first: ProcessLog, other: ProcessLog) -> None:
        self._logs = (first, other)
        self._main = LaunchComparison(first, other)
        self._second = LaunchComparison(first, other)
        self._puts = PutComparison(first, other)
        self._since: float | None = None

    def ahead(self, index: int) -> int:
        """The number of launches that a process is ahead of the other."""
        side = self._side(index)
        return max(each.ahead[side] for each in (self._main, self._second))

    def add(self, index: int, events: Sequence[Event]) -> Iterator[Finding]:
        """Take in what a process does next."""
        side, home = self._side(index), self._logs[self._side(index)].home
        launches = [event for event in events if isinstance(event, Launch)]
        # The main thread's have an order in any case; those of another thread where the main one trains nothing.
        for thread, comparison in (("", self._main), (home, self._second)):
            mine = [each for each in launches if each.thread == thread]
            if mine and (comparison is self._main or thread):
                yield from comparison.add(*((mine, []) if side == 0 else ([], mine)))
        for event in events:
            if isinstance(event, Put):
                yield from self._puts.add(side, event)

    def undecided(self, now: float) -> Iterator[Finding]:
        """Differences that stand for a while, as far as they are known."""
        if not any(each.differs for each in self._compared()):
            self._since = None
        elif self._since is None:
            self._since = now
        else:
            yield from self.rest(End.GOES_ON)

    def rest(self, end: End) -> Iterator[Finding]:
        """The differences that are not decided yet, if nothing more comes."""
        for each in self._compared():
            yield from each.rest(end)

    def _compared(self) -> list[LaunchComparison]:
        return [self._main, *([self._second] if all(log.home for log in self._logs) else [])]

    def _side(self, index: int) -> int:
        return 0 if index == self._logs[0].index else 1
