"""Prints the notes of a release: what CHANGELOG.md says of the version that a tag names.

``python scripts/release_notes.py v0.1.0`` in a checkout. It refuses a tag that is not the version in pyproject.toml,
and a version that CHANGELOG.md has not dated: then nothing is built. Standard library only.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^## \[(?P<version>[^]]+)\](?P<rest>.*)\n(?P<text>(?:(?!## ).*(?:\n|$))*)", re.MULTILINE)
"""A heading such as ``## [0.1.0] - 2026-12-01`` and what is below it."""


def notes(changelog: str, version: str, tag: str) -> str:
    """Return the notes of a release.

    Args:
        changelog: The text of CHANGELOG.md.
        version: The version in pyproject.toml.
        tag: The tag, ``v`` and a version.

    Raises:
        SystemExit: The tag is not this version's, or the changelog has no dated section of it; it carries the text.
    """
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag}, but pyproject.toml has version {version}. Tag v{version}, or change the version.")
    found = {section["version"]: section for section in SECTION.finditer(changelog)}
    if version not in found:
        sys.exit(
            f"CHANGELOG.md has no section [{version}], only {', '.join(found) or 'none'}. Rename [Unreleased] to "
            f"'## [{version}] - YEAR-MONTH-DAY'."
        )
    section = found[version]
    if not re.fullmatch(r" - \d{4}-\d\d-\d\d", section["rest"]):
        sys.exit(f"the section [{version}] of CHANGELOG.md has no date: '## [{version}] - YEAR-MONTH-DAY'.")
    if not section["text"].strip():
        sys.exit(f"the section [{version}] of CHANGELOG.md is empty. Say what is new.")
    return section["text"].strip()


def main() -> None:
    """Print the notes of the tag on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag", help="the tag, such as v0.1.0")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), project["version"], parser.parse_args().tag))


if __name__ == "__main__":
    main()
