"""The table of exit codes, and the page that shows it."""

import re
import signal
from pathlib import Path

from lockstep.exit_codes import EXIT_CODES, INTERRUPTED, KILLED, TERMINATED, describe_code, is_retried

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"


def test_the_page_has_the_table():
    rows = re.findall(r"^\| (\d+) \| (.*) \| (yes|no) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(code): (meaning, retried == "yes") for code, meaning, retried in rows} == {
        row.code: (row.meaning, row.retried) for row in EXIT_CODES.values()
    }
    assert [int(code) for code, _, _ in rows] == sorted(EXIT_CODES)


def test_codes_of_signals_are_those_of_a_shell():
    assert (INTERRUPTED, KILLED, TERMINATED) == (130, 137, 143)


def test_in_words():
    assert describe_code(0) == "exit code 0, done"
    assert describe_code(128 + signal.SIGABRT) == "exit code 134, ended by SIGABRT"
    assert describe_code(77) == "exit code 77" and not is_retried(77)
    assert describe_code(250) == "exit code 250"
