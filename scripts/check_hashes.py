"""The files that pip would install against hashes.txt, where pip itself cannot compare: it refuses hashes beside -e.

    pip install --dry-run --ignore-installed --quiet --report - ... | python scripts/check_hashes.py

It needs nothing but Python. It prints the files as requirements with their hashes, or ends with 1 and a line for each
that is not a known one.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).resolve().parents[1] / "hashes.txt"


def files(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The pin and the hash of each file, from an index or elsewhere, that pip would install."""
    for each in report["install"]:
        if "dir_info" in each["download_info"]:
            continue  # this checkout
        name = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower()
        hashes = each["download_info"].get("archive_info", {}).get("hashes", {})
        yield f"{name}=={each['metadata']['version']}", hashes.get("sha256", "no hash")


def unknown(report: dict[str, Any], known: str) -> Iterator[str]:
    """The files whose hash stands beside no pin of their version."""
    pins = {
        pin.split()[0]: set(re.findall(r"sha256:([0-9a-f]{64})", pin)) for pin in re.split(r"\n(?! )", known.strip())
    }
    for pin, found in files(report):
        if found not in pins.get(pin, ()):
            yield f"{pin}: the file of this index has SHA-256 {found}, which is not in hashes.txt"


if __name__ == "__main__":
    given = json.load(sys.stdin)
    if wrong := list(unknown(given, KNOWN.read_text(encoding="utf-8"))):
        print(*wrong, sep="\n", file=sys.stderr)
        sys.exit(1)
    print(*(f"{pin} --hash=sha256:{found}" for pin, found in files(given)), sep="\n")
