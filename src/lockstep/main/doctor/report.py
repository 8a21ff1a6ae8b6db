"""The report: shown section by section, so that what hangs later takes nothing of it away, and kept as JSON."""

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.credentials import hide_credentials, without_credentials
from lockstep.errors import ConfigError
from lockstep.main.doctor.finding import Finding, JobFinding

FORMAT: Final = 1
"""The value of ``lockstep_doctor`` in the JSON file."""
_STYLES: Final = {"ok": "green", "warning": "yellow", "fix": "bold red"}


class Report:
    """The findings so far; the leader's shows them.

    Args:
        console: Where it is shown: a table per section at a terminal, else a line per finding. None for nowhere.
        path: The JSON file, written anew after each section. None for none.
    """

    def __init__(self, console: Console | None = None, path: str | os.PathLike[str] | None = None) -> None:
        self._console, self._path = console, None if path is None else Path(path)
        self.sections: dict[str, list[JobFinding]] = {}
        self.values: dict[str, Any] = {}
        """Measured numbers and facts, which are in the JSON file alone."""
        self._begun = time.time()

    @property
    def exit_code(self) -> int:
        """1 where something needs a fix, else 0."""
        return int(any(each.finding.outcome == "fix" for each in self._all()))

    def begin(self) -> None:
        """Write the file for the first time.

        Raises:
            ConfigError: It cannot be written.
        """
        try:
            self._write(complete=False)
        except OSError as error:
            raise ConfigError(
                f"json is {self._path}, which cannot be written: {error}. Choose another file."
            ) from error

    def add(self, title: str, findings: Sequence[JobFinding], values: Mapping[str, Any] | None = None) -> None:
        """Show a section and keep it.

        Args:
            title: The section's title.
            findings: The findings; none shows nothing.
            values: JSON values for the file.
        """
        self.values |= hide_credentials(values or {})
        if findings:
            findings = [dataclasses.replace(each, finding=_public(each.finding)) for each in findings]
            self.sections.setdefault(title, []).extend(findings)
            self._show(title, findings)
        self._write(complete=False)

    def finish(self) -> int:
        """Show the sum, write the file for the last time, and return the exit code."""
        counts = {name: sum(each.finding.outcome == name for each in self._all()) for name in _STYLES}
        if self._console is not None:
            seconds = time.time() - self._begun
            text = f"{counts['ok']} ok, {counts['warning']} warnings, {counts['fix']} to fix, {seconds:.0f} s"
            sent = "" if self._path is None else f"; all of it is in {self._path}"
            self._console.print(text + sent, highlight=False, soft_wrap=True, markup=False)
        self._write(complete=True)
        return self.exit_code

    def _all(self) -> list[JobFinding]:
        return [each for section in self.sections.values() for each in section]

    def _show(self, title: str, findings: Sequence[JobFinding]) -> None:
        if self._console is None:
            return
        if self._console.is_terminal:
            self._console.print(_table(title, findings))
            return
        for each in findings:
            self._console.print(_line(each), highlight=False, soft_wrap=True, markup=False)

    def _write(self, *, complete: bool) -> None:
        if self._path is None:
            return
        content = {
            "lockstep_doctor": FORMAT,
            "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._begun)),
            "seconds": round(time.time() - self._begun, 1),
            "complete": complete,
            "exit_code": self.exit_code,
            "sections": {title: [each.as_json() for each in found] for title, found in self.sections.items()},
            **self.values,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        draft.replace(self._path)


def _line(each: JobFinding) -> str:
    finding = each.finding
    where = f" ({each.where})" if each.where else ""
    fix = f" Fix: {finding.fix}" if finding.fix else ""
    return f"{finding.outcome:<7}  {finding.name}{where}: {finding.text}{fix}"


def _table(title: str, findings: Sequence[JobFinding]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(overflow="fold", ratio=4)
    for each in findings:
        finding, style = each.finding, _STYLES[each.finding.outcome]
        where = f"\n[dim]{escape(each.where)}[/]" if each.where else ""
        fix = f"\n[bold]{escape(finding.fix)}[/]" if finding.fix else ""
        table.add_row(
            f"[{style}]{finding.outcome}[/]", f"{escape(finding.name)}{where}", f"{escape(finding.text)}{fix}"
        )
    return table


def _public(finding: Finding) -> Finding:
    name, text, fix = map(without_credentials, (finding.name, finding.text, finding.fix))
    return dataclasses.replace(finding, name=name, text=text, fix=fix)
