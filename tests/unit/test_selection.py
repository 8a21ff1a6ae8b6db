"""Which files of tests a run reads."""

import pytest

from tests.selection import is_read, marks_by_test

FAST, SLOW = "not slow and not nightly", "slow and not nightly and not optimized"
PLAIN = "def test_a():\n    pass\n"
MARKED = "@pytest.mark.slow  # in make test: b\n@pytest.mark.parametrize('n', [1])\ndef test_a(n):\n    pass\n"
ROW = "@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.slow), 2])\ndef test_a(n):\n    pass\n"
MODULE = "pytestmark = [\n    pytest.mark.multiprocess,\n    pytest.mark.slow,\n]\n\n\n" + PLAIN
NIGHTLY = "@pytest.mark.nightly\nclass TestA:\n    def test_a(self):\n        pass\n"


@pytest.mark.parametrize(
    ("text", "fast", "slow"),
    [
        (PLAIN, True, False),
        (MARKED, False, True),
        (ROW, True, True),
        (MODULE, False, True),
        (NIGHTLY, False, False),
        (f"{MARKED}\n\n{PLAIN}", True, True),
        (f"{MARKED}\n\n{NIGHTLY}", False, True),
        (f"import os\n\nSLOW = 1\n\n\n{MARKED}\n\ndef made():\n    return 'nightly'\n", False, True),
        ("from tests.shared import *  # its tests are another file's\n", True, False),
    ],
    ids=["plain", "marked", "row", "module", "class", "one of two", "both", "helpers", "imported"],
)
def test_a_file_is_read_where_one_of_its_tests_can_be_asked_for(tmp_path, text, fast, slow):
    path = tmp_path / "test_a.py"
    path.write_text(text)
    assert (is_read(path, FAST), is_read(path, SLOW)) == (fast, slow)
    assert is_read(path, "") and is_read(path, "slow or nightly")


def test_marks_of_rows_are_not_those_of_the_test():
    assert marks_by_test(f"{ROW}\n\n{MARKED}\n\n{NIGHTLY}") == [set(), {"slow"}, {"nightly"}]
