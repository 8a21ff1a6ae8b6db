"""Runs a command on simulated processes, each recorded, and compares what they do while they do it."""

import base64
import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from lockstep.check.alone import ProcessChecks
from lockstep.check.compare import End, LaunchComparison
from lockstep.check.differences import PutComparison
from lockstep.check.findings import Finding, Findings, shown
from lockstep.check.launches import DIRECTORY, STARTUP
from lockstep.check.log import LAUNCH_TIMED_OUT, Event, Launch, LogReader, ProcessLog, Put
from lockstep.errors import ConfigError
from lockstep.exits import DONE, FAILED, describe_code
from lockstep.files import write_file

AHEAD = 10_000
"""Launches that one process may be ahead of another before its file is left alone until the other has caught up."""
UNDECIDED_S = 2.0  # seconds that a difference stands before it is told, though what follows it is not known yet


class Follower:
    """Compare processes as they go on. What it keeps grows with their programs and lines, not with their launches."""

    def __init__(self, directory: Path, processes: int, on_finding: Callable[[Finding], None]) -> None:
        texts: dict[str, str] = {}
        self._readers = [LogReader(directory / f"process-{index}.jsonl", index, texts) for index in range(processes)]
        self._alone = [ProcessChecks(log) for log in self.logs]
        first, *second_logs = self.logs
        self._pairs = [_Pair(first, second) for second in second_logs]
        self._findings = Findings()
        self._on_finding = on_finding
        self._reported: set[tuple[str, str]] = set()
        self._looked = time.monotonic()

    @property
    def logs(self) -> Sequence[ProcessLog]:
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
        findings = [finding for event in events for finding in self._alone[index].see(event)]
        for pair in pairs:
            findings += pair.add(index, events)
        for finding in findings:
            if self._findings.add(finding):
                self._report_once(finding)

    def _report_once(self, finding: Finding) -> None:
        if finding.key not in self._reported:
            self._reported.add(finding.key)
            self._on_finding(finding)


class _Pair:
    """The comparisons of two processes."""

    def __init__(self, first: ProcessLog, second: ProcessLog) -> None:
        self._logs = (first, second)
        self._main = LaunchComparison(first, second)
        self._second = LaunchComparison(first, second)
        self._puts = PutComparison(first, second)
        self._since: float | None = None

    def ahead(self, index: int) -> int:
        """The number of launches that a process is ahead of the other."""
        side = self._side(index)
        return max(comparison.ahead[side] for comparison in (self._main, self._second))

    def add(self, index: int, events: Sequence[Event]) -> Iterator[Finding]:
        """Take in what a process does next."""
        side, home = self._side(index), self._logs[self._side(index)].home
        launches = [event for event in events if isinstance(event, Launch)]
        # The main thread's have an order in any case; those of another thread where the main one trains nothing.
        for thread, comparison in (("", self._main), (home, self._second)):
            thread_launches = [launch for launch in launches if launch.thread == thread]
            if thread_launches and (comparison is self._main or thread):
                yield from comparison.add(*((thread_launches, []) if side == 0 else ([], thread_launches)))
        for event in events:
            if isinstance(event, Put):
                yield from self._puts.add(side, event)

    def undecided(self, now: float) -> Iterator[Finding]:
        """Differences that stand for a while, as far as they are known."""
        if not any(comparison.differs for comparison in self._compared()):
            self._since = None
        elif self._since is None:
            self._since = now
        else:
            yield from self.rest(End.GOES_ON)

    def rest(self, end: End) -> Iterator[Finding]:
        """The differences that are not decided yet, if nothing more comes."""
        for comparison in self._compared():
            yield from comparison.rest(end)

    def _compared(self) -> list[LaunchComparison]:
        return [self._main, *([self._second] if all(log.home for log in self._logs) else [])]

    def _side(self, index: int) -> int:
        return 0 if index == self._logs[0].index else 1


POLL_S = 0.2  # seconds between two looks at a run
GRACE_S = 3  # seconds between SIGTERM and SIGKILL for the processes of a run that hangs
TIMED_OUT = (*LAUNCH_TIMED_OUT, "Barrier timed out", "DEADLINE_EXCEEDED")
"""Texts in the error of a process that waited for others in vain."""
HUNG = "the processes waited for each other, and the run was ended"
HUNG_TOGETHER = f"{HUNG}; no finding says why: the devices may have stopped in a launch that all have made"
HOOK = """
try:
    from lockstep.check.launches import at_start
except Exception:
    import os, sys
    from importlib import machinery, util

    others = [path for path in sys.path if path and os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
    spec = machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(util.module_from_spec(spec))
else:
    at_start()
"""
"""The ``sitecustomize`` module of the processes; a Python that cannot import lockstep runs the one behind it alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check."""

    command: Sequence[str]
    code: int
    end: End
    findings: tuple[Finding, ...]
    launches: tuple[int, ...]
    other_threads: int  # launches of one process alone, outside the main thread: not compared
    errors: dict[int, str]  # the error of each process that ended with one, by its number
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 where the run ended well and nothing was found, else 1."""
        return DONE if not self.findings and self.code == DONE else FAILED

    @property
    def problem(self) -> str | None:
        """Why the run did not come to its end; None where it did."""
        if self.end is End.HUNG:
            return HUNG if self.findings else HUNG_TOGETHER
        return None if self.code == DONE else f"the command ended with {describe_code(self.code)}"

    def as_json(self) -> dict[str, Any]:
        return {
            "command": list(self.command),
            "exit_code": self.exit_code,
            "problem": self.problem,
            "launches": list(self.launches),
            "seconds": round(self.seconds, 3),
            "errors": {str(process): text for process, text in self.errors.items()},
            "findings": [finding.as_json() for finding in self.findings],
        }


def check_command(
    command: Sequence[str],
    *,
    processes: int = 2,
    devices: int = 2,
    stall_s: float = 15.0,
    ignore: Collection[str] = (),
    on_finding: Callable[[Finding], None] | None = None,
) -> CheckResult:
    """Run a command as the processes of a job on CPU devices, and find what would go wrong on a pod.

    Args:
        command: A program and its arguments; if it is in Python and imports JAX, it is recorded without a change.
        stall_s: The seconds without a launch on any process after which processes that wait for each other are ended.
        ignore: Names of kinds of findings that are left out.
        on_finding: Is called with each finding that is seen before the run ends, as soon as it is.

    Raises:
        ConfigError: Nothing was recorded: the command imports no JAX, or starts a Python that does not see us.
    """
    began = time.monotonic()

    def tell_kept(finding: Finding) -> None:
        if on_finding is not None and finding.kind not in ignore:
            on_finding(finding)

    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as name:
        directory = Path(name)
        (directory / STARTUP).mkdir()
        write_file(directory / STARTUP / "sitecustomize.py", HOOK)
        follower = Follower(directory, processes, tell_kept)
        code, stalled = _run(command, processes, devices, directory, stall_s, follower)
        follower.read()
        logs = follower.logs
        if not any(log.launches for log in logs):
            raise ConfigError(
                f"no launch of {' '.join(command)} was seen ({describe_code(code)}). It must run JAX in the Python "
                "process that the command starts, with the Python of this environment and without -I, -E or -S."
            )
        errors = {log.index: log.error[0] for log in logs if log.error is not None}
        hung = stalled or any(text in error for error in errors.values() for text in TIMED_OUT)
        end = End.HUNG if hung else End.DONE if code == DONE else End.FAILED
        findings = follower.finish(end)
    return CheckResult(
        command=command,
        code=code,
        end=end,
        findings=tuple(finding for finding in findings if finding.kind not in ignore),
        launches=tuple(log.launches for log in logs),
        other_threads=sum(log.other_threads for log in logs),
        errors=errors,
        seconds=time.monotonic() - began,
    )


def _run(
    command: Sequence[str], processes: int, devices: int, directory: Path, stall_s: float, follower: Follower
) -> tuple[int, bool]:
    """The exit code of the run, and whether it was ended because processes waited for each other."""
    launcher = [sys.executable, "-c", "import sys; from lockstep.launch import main; sys.exit(main())"]
    launcher += ["--backend", "local", "--processes", str(processes), "--devices_per_process", str(devices)]
    path = [str(directory / STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {DIRECTORY: str(directory), "PYTHONPATH": os.pathsep.join(path)}
    words = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    run = subprocess.Popen([*launcher, "--grace_s", str(GRACE_S), *words, "--", *command])
    try:
        looked = 0.0
        while run.poll() is None:
            time.sleep(POLL_S)
            follower.read()
            files = list(directory.glob("process-*.jsonl"))
            last = max((file.stat().st_mtime for file in files), default=time.time())
            if time.time() - last < stall_s or last == looked:
                continue
            looked = last
            if follower.waits():
                return _end(run), True
        return run.returncode, False
    finally:
        if run.poll() is None:
            _end(run)


def _end(run: subprocess.Popen[bytes]) -> int:
    """End the launcher, and with it the processes; its exit code."""
    run.terminate()
    try:
        return run.wait(2 * GRACE_S)
    except subprocess.TimeoutExpired:  # it cannot write, or was stopped; the kernel ends its processes with it
        run.kill()
        return run.wait()


SHOWN_FRAMES = 6  # frames of a call stack that a terminal shows


def print_report(result: CheckResult, console: Console) -> None:
    """Print what was found."""

    def put(text: str = "") -> None:
        console.print(text, soft_wrap=True, highlight=False)

    put()
    for number, finding in enumerate(result.findings, 1):
        _print_finding(finding, number, put)
    for process, text in result.errors.items():
        put(f"process {process} failed: {escape(text.splitlines()[0])}")
    counts = ", ".join(map(str, result.launches))
    if result.problem:
        put(f"[yellow]![/] {escape(result.problem)}; it was compared up to there.")
    if result.other_threads:
        put(f"  {result.other_threads} launches on one process's own devices, from other threads: not compared.")
    if result.findings:
        put(f"[bold red]✗ {len(result.findings)} findings[/] (launches by process: {counts}). --html FILE: as a page")
    elif result.problem:
        put(f"[bold yellow]! nothing found up to there[/] (launches by process: {counts}; {result.seconds:.1f} s)")
    else:
        put(f"[bold green]✓ nothing found[/] (launches by process: {counts}; {result.seconds:.1f} s)")


def print_at_once(finding: Finding, console: Console) -> None:
    """Print a line about a finding while the run goes on, between the lines of its processes."""
    places = [
        f"process {place.process} {place.text}"
        + (f" at {shown(place.line.file)}:{place.line.line}" if place.line else "")
        for place in finding.places
    ]
    text = escape(f"{finding.text}: {'; '.join(places)}")
    console.print(f"[bold red]lockstep check: {finding.kind}[/]: {text}", soft_wrap=True, highlight=False)


def _print_finding(finding: Finding, number: int, put: Callable[..., None]) -> None:
    times = f", {finding.count} times" if finding.count > 1 else ""
    put(f"[bold red]{number}. {finding.kind}[/]: {escape(finding.about.title)}")
    put(f"   {escape(finding.text)}{times}")
    for place in finding.places:
        line = place.line
        where = f" at [bold]{escape(shown(line.file))}:{line.line}[/]" if line else ""
        put(f"   process {place.process} {escape(place.text)}{where}")
        if line and line.text:
            put(f"       {escape(line.text)}")
        for frame in [inner_frame for inner_frame in place.stack if inner_frame is not line][:SHOWN_FRAMES]:
            put(f"       [dim]{escape(shown(frame.file))}:{frame.line} in {escape(frame.function)}[/]")
    for detail in finding.details:
        put(f"   | {escape(detail)}")
    put(f"   On a pod: {escape(finding.about.on_pod)}")
    put(f"   Change: {escape(finding.about.fix)}")
    put()


def render_page(result: CheckResult) -> str:
    """A page of what was found, in one file that loads nothing and runs no script."""
    import jinja2
    from markupsafe import Markup

    folder = resources.files(__package__) / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    digest = "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return template.render(result=result, style=Markup(style), style_hash=digest, shown=shown)


def write_page(result: CheckResult, file: Path) -> None:
    """Write the page."""
    write_file(file, render_page(result).encode(errors="backslashreplace"))
