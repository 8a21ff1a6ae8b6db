"""The table of exit codes, and that the documentation has it."""

import re
from pathlib import Path

import pytest

from lockstep import exits
from lockstep.exits import EXIT_CODES, before_end, cause_of, describe_code, finish_work, is_retried
from tests.clock import Clock

ROOT = Path(__file__).parents[2]


def test_the_documentation_has_the_table():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("## Exit codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*) \| (yes|no) \|$", section, re.MULTILINE)
    table = [(str(row.code), row.meaning, "yes" if row.retried else "no") for row in EXIT_CODES.values()]
    assert rows == table, "write the rows of lockstep/exits.py into docs/troubleshooting.md"


def test_every_name_is_a_row():
    names = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert names == set(EXIT_CODES) and all(code == row.code for code, row in EXIT_CODES.items())


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0, done"),
        (143, "exit code 143, asked to end"),
        (136, "exit code 136, ended by SIGFPE"),
        (42, "exit code 42"),
    ],
)
def test_a_code_in_words(code, text):
    assert describe_code(code).startswith(text)


def test_what_is_tried_again():
    assert [code for code in (0, 1, 2, 85, 87, 90, 137, 143, 42) if is_retried(code)] == [85, 87, 137, 143]


@pytest.mark.parametrize(
    ("codes", "own", "cause"),
    [
        ([137, 93], [], 137),  # what a survivor sees of one that was killed is a broken connection
        ([137, 1], [], 137),
        ([137, 85, 93], [], 137),
        ([139, 93], [], 139),
        ([135, 85], [], 135),
        ([137, 3], [3], 3),  # the launcher ends the others by force
        ([85, 93, 137], [], 93),
        ([134, 93], [], 93),  # JAX aborts a process where another is gone
        ([85, 134], [], 85),
        ([143, 93], [], 93),
        ([93, 1], [], 1),
    ],
)
def test_of_processes_that_ended_the_cause_of_the_others_is_named(codes, own, cause):
    """In the order of time; `own`: those with an error of their own."""
    assert cause_of(codes, lambda code: code, own) == cause


@pytest.fixture
def nothing_else(monkeypatch):
    monkeypatch.setattr(exits, "_registered", [])


def test_all_work_has_one_time_together_and_what_is_not_done_is_told(nothing_else, monkeypatch):
    seen, clock = [], Clock(1000.0)
    monkeypatch.setattr(exits, "time", clock)

    @before_end
    def slow(timeout_s):
        seen.append(timeout_s)
        clock.now += 1.5
        return ["step 2 is lost"]

    @before_end
    def late(timeout_s):
        seen.append(timeout_s)
        return ["step 4 is lost"]

    assert finish_work(2.0) == ["step 2 is lost", "step 4 is lost"] and seen == [2.0, 0.5]
    assert finish_work(1.0) == ["step 2 is lost", "step 4 is lost"] and seen[2:] == [1.0, 0.0]


def test_what_raises_holds_up_nobody(nothing_else):
    before_end(lambda timeout_s: 1 / 0)
    before_end(lambda timeout_s: [])
    assert finish_work(1) == []
