"""The report of a check, for a terminal, a log and a browser."""

import base64
import hashlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from lockstep.check.findings import Finding
from lockstep.check.run import CheckResult
from lockstep.check.stack import Frame, shown

SHOWN_FRAMES = 6
"""Frames of a call stack that a terminal shows."""


def print_report(result: CheckResult, console: Console) -> None:
    """Print what was found.

    Args:
        result: What came of the check.
        console: Where; what is no terminal gets plain lines.
    """

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
        for frame in _others(place.stack, line):
            put(f"       [dim]{escape(shown(frame.file))}:{frame.line} in {escape(frame.function)}[/]")
    for detail in finding.details:
        put(f"   | {escape(detail)}")
    put(f"   On a pod: {escape(finding.about.on_pod)}")
    put(f"   Change: {escape(finding.about.fix)}")
    put()


def _others(stack: tuple[Frame, ...], line: Frame | None) -> list[Frame]:
    return [frame for frame in stack if frame is not line][:SHOWN_FRAMES]


def render_page(result: CheckResult) -> str:
    """A page of what was found, in one file that loads nothing and runs no script.

    Args:
        result: What came of the check.
    """
    import jinja2
    from markupsafe import Markup

    folder = resources.files(__package__) / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    digest = "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return template.render(result=result, style=Markup(style), style_hash=digest, shown=shown)


def write_page(result: CheckResult, file: Path) -> None:
    """Write the page.

    Args:
        result: What came of the check.
        file: Where.

    Raises:
        OSError: The file cannot be written.
    """
    file.write_text(render_page(result), encoding="utf-8", errors="backslashreplace")
