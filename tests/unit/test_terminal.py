"""Names and texts of others at the terminal: as they are, whatever they say to it."""

import ast
import io
import json
import os

import pytest
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from lockstep.batch_inference.summary import Outcome, Totals, closing_words, summary_table
from lockstep.doctor.finding import Finding, Findings, merge
from lockstep.main.results import run_report, run_tail
from lockstep.printable import print_lines
from lockstep.report import print_table
from lockstep.terminal import Console
from tests.sources import sources
from tests.unit.report.trackers.fakes import row

NAME = "\x1b[2J\x1b]0;pwned\x07[red]x[/red][/]<b>\u202e"
"""A name that clears the screen, sets the window's title, is markup of rich and of HTML, and turns what follows."""
SHOWN = r"\x1b[2J\x1b]0;pwned"


def console(**options):
    return Console(file=io.StringIO(), width=200, **options)


def progress(to):
    with Progress(TextColumn("{task.fields[text]}", markup=False), console=to) as bar:
        bar.add_task("a", text=NAME)


def table(of=str):
    made = Table(title=of(NAME), caption=of(NAME))
    made.add_column(of(NAME))
    made.add_row(of(NAME))
    return made


SHOWS = {
    "a text": lambda to: to.print(NAME),
    "a table of texts": lambda to: to.print(table()),
    "a table": lambda to: to.print(table(Text)),
    "a panel": lambda to: to.print(Panel(Text(NAME), title=Text(NAME))),
    "a bar": progress,
    "a log": lambda to: to.log(NAME),
    "rows": lambda to: print_table([row(1, NAME, **{NAME: 1.0})], title=NAME, console=to),
    "a summary": lambda to: to.print(summary_table(outcome())),
    "findings": lambda to: Findings(to).add("files", merge([[Finding.to_fix(NAME, NAME, NAME)]])),
}


def outcome():
    totals = Totals(rows=1, tokens=1, finish={NAME: 1}, sums={NAME: 1.0}, counts={NAME: 1})
    return Outcome(
        totals=totals,
        prompts=1,
        hosts=1,
        mode="a",
        found=0,
        tokens=1,
        seconds=1.0,
        load_s=0.0,
        loaded_bytes=0,
        memory={},
    )


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("way", SHOWS)
def test_a_name_is_shown_as_it_is(way, terminal):
    to = console(force_terminal=terminal, color_system=None)
    SHOWS[way](to)
    text = to.file.getvalue()
    assert SHOWN in text and "[red]x[/re" in text
    assert "\x1b[2J" not in text and "\x1b]" not in text and "\x07" not in text and "\u202e" not in text


FILE = NAME.replace("/", "")
ROW = row(1, NAME, **{NAME: 1.0}).to_dict() | {"step": 1}


def test_a_run_of_such_a_name_is_reported_and_followed(tmp_path, capsysbinary):
    run = tmp_path / (FILE + os.fsdecode(b"\xff"))
    run.mkdir()
    (run / "samples.jsonl").write_text(json.dumps(ROW) + "\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, NAME: 0.5}) + "\n")
    assert run_report([str(run)]) == 0
    assert run_tail([str(run), "--no-follow"]) == 0
    print_lines(closing_words([("rows", run)]))
    shown = capsysbinary.readouterr().out.decode()
    assert shown.count(r"\x1b]0;pwned\x07[red]x") >= 4 and "\x1b[2J" not in shown and "\x07" not in shown
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<b>\u202e" not in page.replace("\\u003cb", "")


RAW = ("rich.get_console", "rich.print", "sys.stdout.write")


def to_the_terminal(source: str) -> set[str]:
    """What a source text calls that writes to a terminal by another way than `lockstep.terminal` and `print_lines`."""
    tree = ast.parse(source)
    found = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("rich", "rich.console", "rich.markup")
        for alias in node.names
        if alias.name in ("get_console", "print", "inspect")
    }
    made_by_rich = any(
        isinstance(node, ast.ImportFrom) and node.module == "rich.console" and "Console" in {a.name for a in node.names}
        for node in ast.walk(tree)
    )
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        options = {each.arg: ast.unparse(each.value) for each in call.keywords}
        if (name == "print" and "file" not in options) or name in (
            "rich.get_console",
            "rich.print",
            "sys.stdout.write",
        ):
            found.add(name)
        elif name == "Console" and made_by_rich:
            found.add(name)
        elif name == "Panel" and "title" in options and not options["title"].startswith("Text("):
            found.add("Panel")
        elif name == "TextColumn" and "{task" in ast.unparse(call) and options.get("markup") != "False":
            found.add("TextColumn")
    return found


OF_OTHERS = ("launch/", "testing/", "hosts/")
"""Rooms that print what they have made themselves, and logs of workers as they are (docs/security.md)."""
ALLOWED = {
    "main/cli.py": {"print": "the help"},
    "main/help.py": {"print": "a script of the package"},
    "main/prepare.py": {"sys.stdout.write": "lines of the user's own configuration"},
    "printable.py": {"print": "the owner"},
}


def test_nothing_else_writes_to_the_terminal():
    files = sources(r"\b(print|rich|stdout|Console|Panel|TextColumn)\b")
    calls = {name: to_the_terminal(text) for name, text in files.items() if not name.startswith(OF_OTHERS)}
    calls = {name: written for name, written in calls.items() if written}
    assert calls == {name: set(reasons) for name, reasons in ALLOWED.items()}


@pytest.mark.parametrize(
    "source",
    [
        "print(a)",
        "import rich\nrich.get_console().print(a)",
        "from rich import print",
        "from rich.console import Console\nConsole().print(a)",
        "Panel(a, title=name)",
        "TextColumn('{task.fields[a]}')",
    ],
)
def test_another_way_is_seen(source):
    assert to_the_terminal(source)
    assert not to_the_terminal("from lockstep.terminal import Console\nConsole().print(a)\nprint(a, file=b)")
