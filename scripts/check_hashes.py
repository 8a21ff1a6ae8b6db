"""The files that pip would install against hashes.txt, where pip itself cannot compare: it refuses hashes beside -e.

    pip install --dry-run --ignore-installed --quiet --report - ... | python scripts/check_hashes.py

It needs nothing but Python, and ends with 1 and a line for each file that is not a known one.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).resolve().parents[1] / "hashes.txt"


def unknown(report: dict[str, Any], known: str) -> Iterator[str]:
    """What pip would install, from an index or a file, whose hash stands beside no pin of its version."""
    pins = {
        pin.split()[0]: set(re.findall(r"sha256:([0-9a-f]{64})", pin)) for pin in re.split(r"\n(?! )", known.strip())
    }
    for each in report["install"]:
        if "dir_info" in each["download_info"]:
            continue  # this checkout
        name = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower()
        pin = f"{name}=={each['metadata']['version']}"
        found = each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "no hash")
        if found not in pins.get(pin, ()):
            yield f"{pin}: the file of this index has SHA-256 {found}, which is not in hashes.txt"


if __name__ == "__main__":
    wrong = list(unknown(json.load(sys.stdin), KNOWN.read_text(encoding="utf-8")))
    print("\n".join(wrong), end="\n" * bool(wrong), file=sys.stderr)
    sys.exit(bool(wrong))
