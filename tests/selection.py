"""Which files of tests a run reads: each worker imports them all, with the libraries that they name."""

import functools
import re
from pathlib import Path

MARKS = "slow|nightly|optimized"
"""By which `make` selects."""


@functools.cache
def marks_named_in(path: Path) -> frozenset[str]:
    """The marks that a file has anywhere, for a test or for one of its rows."""
    return frozenset(re.findall(MARKS, path.read_text(encoding="utf-8")))


def marks_by_test(text: str) -> list[set[str]]:
    """The marks that all rows of a test have, by test; `ruff format` puts two empty lines between them."""
    module_marks = "".join(re.findall(r"^pytestmark = (?:\[[^]]*\]|.*)", text, re.MULTILINE))
    shared = set(re.findall(rf"\bmark\.({MARKS})\b", module_marks))
    parts = (part for part in text.split("\n\n\n") if re.search(r"^(async def|def|class) [tT]est", part, re.MULTILINE))
    return [shared | set(re.findall(rf"^@pytest\.mark\.({MARKS})\b", part, re.MULTILINE)) for part in parts]


def is_read(path: Path, expression: str) -> bool:
    """Whether a test of the file can be asked for by ``-m expression``."""
    if " or " in expression:
        return True
    unwanted = set(re.findall(rf"\bnot ({MARKS})\b", expression))
    asked = set(re.findall(rf"\b(?:{MARKS})\b", expression)) - unwanted
    by_test = marks_by_test(path.read_text(encoding="utf-8"))
    return asked <= marks_named_in(path) and (not by_test or any(not unwanted & marks for marks in by_test))
