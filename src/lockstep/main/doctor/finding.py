"""A finding of doctor, and checks that look for some: one that may take long or hang runs in a thread."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self

from lockstep.hosts import name_processes

Outcome = Literal["ok", "warning", "fix"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The finding of one check.

    Args:
        name: The name of what was looked at, a word or two.
        outcome: ``ok``; ``warning`` for what a run survives; ``fix`` for what will end or spoil it.
        text: What was found.
        fix: What to do about it; empty where there is nothing to do, or where the text says it already.
    """

    name: str
    outcome: Outcome
    text: str
    fix: str = ""

    @classmethod
    def ok(cls, name: str, text: str) -> Self:
        """A finding that is as it should be."""
        return cls(name=name, outcome="ok", text=text)

    @classmethod
    def warning(cls, name: str, text: str, fix: str = "") -> Self:
        """A finding that a run survives."""
        return cls(name=name, outcome="warning", text=text, fix=fix)

    @classmethod
    def to_fix(cls, name: str, text: str, fix: str = "") -> Self:
        """A finding that will end or spoil a run."""
        return cls(name=name, outcome="fix", text=text, fix=fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFinding:
    """A finding with the processes that have it.

    Args:
        processes: The numbers of the processes.
        count: The number of processes of the job.
    """

    finding: Finding
    processes: tuple[int, ...]
    count: int

    @property
    def where(self) -> str:
        """The processes in words; empty where it is all of them."""
        return "" if len(self.processes) == self.count else name_processes(self.processes)

    def as_json(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return {**dataclasses.asdict(self.finding), "processes": list(self.processes)}


def attempt(name: str, check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """Do a check on this process; where it fails itself, that is what it found.

    Args:
        name: The name of what is looked at.
        check: The check.

    Returns:
        Its findings.
    """
    try:
        found = check()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:  # a report with one line that failed is worth more than none
        return [failed(name, error)]


def failed(name: str, error: BaseException) -> Finding:
    """The finding of a check that raised.

    Args:
        name: The name of what was looked at.
        error: What it raised.
    """
    text = " ".join(str(error).split()) or "no text"
    return Finding.to_fix(name, f"{type(error).__name__}: {text[:1500]}")


def merge(by_process: Sequence[Sequence[Finding]]) -> list[JobFinding]:
    """The findings of all processes, each once, with the processes that have it.

    What is ok under one name is one line, however its text differs from host to host: the text is then that of the
    first process.

    Args:
        by_process: The findings of each process, by process number.
    """
    texts: dict[tuple[str, str, str], Finding] = {}
    processes: collections.defaultdict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    others: collections.defaultdict[tuple[str, str, str], int] = collections.defaultdict(int)
    for process, findings in enumerate(by_process):
        seen: collections.Counter[str] = collections.Counter()
        for each in findings:
            # A process may have several of one name: the first belongs to the first of another process.
            seen[each.name] += each.outcome == "ok"
            same = str(seen[each.name]) if each.outcome == "ok" else f"{each.text}\n{each.fix}"
            key = (each.name, str(each.outcome), same)
            first = texts.setdefault(key, each)
            others[key] += first.text != each.text
            if process not in processes[key]:
                processes[key].append(process)
    order = list(dict.fromkeys(name for name, _, _ in texts))
    merged = []
    for key, finding in sorted(texts.items(), key=lambda item: order.index(item[0][0])):
        if others[key]:
            text = f"{finding.text} (process {processes[key][0]}; {others[key]} more are ok too)"
            finding = dataclasses.replace(finding, text=text)
        merged.append(JobFinding(finding=finding, processes=tuple(processes[key]), count=len(by_process)))
    return merged


class BackgroundCheck:
    """A check in a thread of its own, which does not keep the process alive.

    Args:
        name: The name of what is looked at.
        check: The check; it launches nothing.
        fix: What to do where it does not end in time.
    """

    def __init__(self, name: str, check: Callable[[], Finding | Iterable[Finding]], fix: str) -> None:
        self.name, self._fix = name, fix
        self._begun = time.monotonic()
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, args=(check,), name="lockstep-doctor", daemon=True)
        self._thread.start()

    def _run(self, check: Callable[[], Finding | Iterable[Finding]]) -> None:
        self._found = attempt(self.name, check)

    def findings(self, timeout_s: float) -> list[Finding]:
        """The findings, or one that says that there was no answer.

        Args:
            timeout_s: The seconds since it began that it may take.
        """
        self._thread.join(max(0.0, self._begun + timeout_s - time.monotonic()))
        if self._found is None:
            return [Finding.to_fix(self.name, f"no answer within {timeout_s:g} s.", self._fix)]
        return self._found


def wait_for_all(checks: Sequence[BackgroundCheck], timeout_s: float) -> list[Finding]:
    """The findings of several checks, which run at the same time.

    Args:
        timeout_s: The seconds since its beginning that each may take.
    """
    return [finding for check in checks for finding in check.findings(timeout_s)]
