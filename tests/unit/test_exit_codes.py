"""The table of exit codes, and that the documentation has it."""

import re
from pathlib import Path

import pytest

from lockstep import exit_codes
from lockstep.exit_codes import EXIT_CODES, describe_code, is_retried

ROOT = Path(__file__).parents[2]


def test_the_documentation_has_the_table():
    page = (ROOT / "docs" / "errors-and-exits.md").read_text(encoding="utf-8")
    section = page.partition("## Exit codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*) \| (yes|no) \|$", section, re.MULTILINE)
    table = [(str(row.code), row.meaning, "yes" if row.retried else "no") for row in EXIT_CODES.values()]
    assert rows == table, "write the rows of lockstep/exit_codes.py into docs/errors-and-exits.md"


def test_every_name_is_a_row():
    names = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
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
    assert [code for code in (0, 1, 2, 85, 87, 90, 143, 42) if is_retried(code)] == [85, 87, 143]
