"""The modules of the package as texts, for tests of what no module may do."""

import functools
import re
from pathlib import Path

import lockstep

PACKAGE = Path(lockstep.__file__).parent


@functools.cache
def all_sources() -> dict[str, str]:
    """The text of each module, by its path below the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def sources(pattern: str) -> dict[str, str]:
    """The modules that a pattern is found in: those without the name of what is looked for need not be parsed."""
    return {name: text for name, text in all_sources().items() if re.search(pattern, text)}
