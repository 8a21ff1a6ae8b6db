"""A finding of doctor, the checks that look for some, and the report of all."""

import collections
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.hosts import name_processes
from lockstep.printable import hide_credentials, without_secrets, write_to_stdout

Outcome = Literal["ok", "warning", "fix"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The finding of one check."""

    name: str
    outcome: Outcome  # `ok`; `warning` for what a run survives; `fix` for what will end or spoil it
    text: str
    fix: str = ""  # what to do about it; empty where there is nothing to do, or where the text says it already

    @classmethod
    def ok(cls, name: str, text: str) -> Self:
        return cls(name=name, outcome="ok", text=text)

    @classmethod
    def warning(cls, name: str, text: str, fix: str = "") -> Self:
        return cls(name=name, outcome="warning", text=text, fix=fix)

    @classmethod
    def to_fix(cls, name: str, text: str, fix: str = "") -> Self:
        return cls(name=name, outcome="fix", text=text, fix=fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFinding:
    """A finding with the processes that have it."""

    finding: Finding
    processes: tuple[int, ...]
    count: int

    @property
    def where(self) -> str:
        """The processes in words; empty where it is all of them."""
        return "" if len(self.processes) == self.count else name_processes(self.processes)

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.finding), "processes": list(self.processes)}


def attempt(name: str, check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """Do a check on this process; where it fails itself, that is what it found."""
    try:
        result = check()
        return [result] if isinstance(result, Finding) else list(result)
    except Exception as error:  # a report with one line that failed is worth more than none
        return [failed(name, error)]


def failed(name: str, error: BaseException) -> Finding:
    """The finding of a check that raised."""
    text = without_secrets(" ".join(str(error).split())) or "no text"
    return Finding.to_fix(name, f"{type(error).__name__}: {text[:1500]}")


def merge(by_process: Sequence[Sequence[Finding]]) -> list[JobFinding]:
    """The findings of all processes, each once, with the processes that have it.

    What is ok under one name is one line, however its text differs from host to host: the text is then that of the
    first process.
    """
    texts: dict[tuple[str, str, str], Finding] = {}
    processes: collections.defaultdict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    further: collections.defaultdict[tuple[str, str, str], int] = collections.defaultdict(int)
    for process, findings in enumerate(by_process):
        seen: collections.Counter[str] = collections.Counter()
        for finding in findings:
            # A process may have several of one name: the first belongs to the first of another process.
            seen[finding.name] += finding.outcome == "ok"
            same = str(seen[finding.name]) if finding.outcome == "ok" else f"{finding.text}\n{finding.fix}"
            key = (finding.name, str(finding.outcome), same)
            first = texts.setdefault(key, finding)
            further[key] += first.text != finding.text
            if process not in processes[key]:
                processes[key].append(process)
    order = list(dict.fromkeys(name for name, _, _ in texts))
    merged = []
    for key, finding in sorted(texts.items(), key=lambda item: order.index(item[0][0])):
        if further[key]:
            text = f"{finding.text} (process {processes[key][0]}; {further[key]} more are ok too)"
            finding = dataclasses.replace(finding, text=text)
        merged.append(JobFinding(finding=finding, processes=tuple(processes[key]), count=len(by_process)))
    return merged


class BackgroundCheck:
    """A check that launches nothing, in a thread of its own, which does not keep the process alive."""

    def __init__(self, name: str, check: Callable[[], Finding | Iterable[Finding]], fix: str) -> None:
        self.name, self._fix = name, fix
        self._begun = time.monotonic()
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, args=(check,), name="lockstep-doctor", daemon=True)
        self._thread.start()

    def _run(self, check: Callable[[], Finding | Iterable[Finding]]) -> None:
        self._found = attempt(self.name, check)

    def findings(self, timeout_s: float) -> list[Finding]:
        """The findings, or one that says that there was no answer within some seconds since it began."""
        self._thread.join(max(0.0, self._begun + timeout_s - time.monotonic()))
        if self._found is None:
            return [Finding.to_fix(self.name, f"no answer within {timeout_s:g} s.", self._fix)]
        return self._found


def wait_for_all(checks: Sequence[BackgroundCheck], timeout_s: float) -> list[Finding]:
    """The findings of several checks, which run at the same time."""
    return [finding for check in checks for finding in check.findings(timeout_s)]


FORMAT: Final = 1  # the value of `lockstep_doctor` in the JSON file
_STYLES: Final = {"ok": "green", "warning": "yellow", "fix": "bold red"}


class Findings:
    """The findings so far; the leader's shows them."""

    def __init__(self, console: Console | None = None, path: str | os.PathLike[str] | None = None) -> None:
        self._console, self._path = console, None if path is None else Path(path)
        self.sections: dict[str, list[JobFinding]] = {}
        self.values: dict[str, Any] = {}  # measured numbers and facts, which are in the JSON file alone
        self._begun = time.time()

    @property
    def exit_code(self) -> int:
        """1 where something needs a fix, else 0."""
        return int(any(job_finding.finding.outcome == "fix" for job_finding in self._all()))

    def begin(self) -> None:
        """Write the file for the first time."""
        try:
            self._write(complete=False)
        except OSError as error:
            raise ConfigError(
                f"json is {self._path}, which cannot be written: {error}. Choose another file."
            ) from error

    def add(self, title: str, findings: Sequence[JobFinding], values: Mapping[str, Any] | None = None) -> None:
        """Show a section and keep it."""
        self.values |= hide_credentials(values or {})
        if findings:
            findings = [
                dataclasses.replace(job_finding, finding=_public(job_finding.finding)) for job_finding in findings
            ]
            self.sections.setdefault(title, []).extend(findings)
            self._show(title, findings)
        self._write(complete=False)

    def finish(self) -> int:
        """Show the sum, write the file for the last time, and return the exit code."""
        counts = {name: sum(job_finding.finding.outcome == name for job_finding in self._all()) for name in _STYLES}
        if self._console is not None:
            seconds = time.time() - self._begun
            text = f"{counts['ok']} ok, {counts['warning']} warnings, {counts['fix']} to fix, {seconds:.0f} s"
            sent = "" if self._path is None else f"; all of it is in {self._path}"
            self._print(text + sent)
        self._write(complete=True)
        return self.exit_code

    def _all(self) -> list[JobFinding]:
        return [job_finding for section in self.sections.values() for job_finding in section]

    def _show(self, title: str, findings: Sequence[JobFinding]) -> None:
        if self._console is None:
            return
        if self._console.is_terminal:
            console, table = self._console, _table(title, findings)
            write_to_stdout(lambda: console.print(table))
            return
        for job_finding in findings:
            self._print(_line(job_finding))

    def _print(self, line: str) -> None:
        console = self._console
        if console is not None:
            write_to_stdout(lambda: console.print(line, highlight=False, soft_wrap=True, markup=False))

    def _write(self, *, complete: bool) -> None:
        if self._path is None:
            return
        content = {
            "lockstep_doctor": FORMAT,
            "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._begun)),
            "seconds": round(time.time() - self._begun, 1),
            "complete": complete,
            "exit_code": self.exit_code,
            "sections": {
                title: [job_finding.as_json() for job_finding in listed] for title, listed in self.sections.items()
            },
            **self.values,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._path, json.dumps(content, indent=2) + "\n")


def _line(job_finding: JobFinding) -> str:
    finding = job_finding.finding
    where = f" ({job_finding.where})" if job_finding.where else ""
    fix = f" Fix: {finding.fix}" if finding.fix else ""
    return f"{finding.outcome:<7}  {finding.name}{where}: {finding.text}{fix}"


def _table(title: str, findings: Sequence[JobFinding]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(overflow="fold", ratio=4)
    for job_finding in findings:
        finding, style = job_finding.finding, _STYLES[job_finding.finding.outcome]
        name, text = Text(finding.name), Text(finding.text)
        if job_finding.where:
            name.append(f"\n{job_finding.where}", style="dim")
        if finding.fix:
            text.append(f"\n{finding.fix}", style="bold")
        table.add_row(Text(finding.outcome, style=style), name, text)
    return table


def _public(finding: Finding) -> Finding:
    name, text, fix = map(without_secrets, (finding.name, finding.text, finding.fix))
    return dataclasses.replace(finding, name=name, text=text, fix=fix)
