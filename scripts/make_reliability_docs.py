"""Write the table of faults in docs/reliability.md from tests/faults/table.py and what the tests measured.

The seconds of the last test run are in build/fault-seconds.json; a row that was not run keeps those it has.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "reliability.md"
MEASURED = ROOT / "build" / "fault-seconds.json"
BEGIN, END = "<!-- table: scripts/make_reliability_docs.py -->", "<!-- end of table -->"
COUNTS = ("2", "4")
MIN_SHOWN_S, LESS = 0.05, "< 0.1"
"""The shortest time in seconds that is shown as a number, and the text for a shorter one."""

type Seen = Mapping[str, Mapping[str, float]]
"""The seconds that were measured, by fault and number of processes."""


def render(page: str, seen: Seen, date: str | None = None) -> str:
    """Return the page with a new table.

    Args:
        page: The page, with both marks.
        seen: The seconds measured for each fault; a missing one is shown as a dash.
        date: The date of the last measurement; None keeps the page's.
    """
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    date = date or _date(table)
    lines = [
        f"| fault | how it ends | what the user reads | limit in the test | seen {date} |",
        "|---|---|---|---:|---:|",
    ]
    for fault in _faults():
        mark = " ⁴" if fault.on_four else ""
        sees = f"… {fault.sees} …".replace("|", "\\|") if fault.sees else "nothing"
        found = seen.get(fault.name, {})
        shown = [_shown(found[count]) if count in found else "–" for count in COUNTS[: 2 if fault.on_four else 1]]
        lines.append(f"| {fault.what}{mark} | {fault.ends} | {sees} | {fault.deadline_s:g} s | {' / '.join(shown)} s |")
    return before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after


def seen_on(page: str) -> dict[str, dict[str, float]]:
    """Return the measurements in the page's table."""
    names = {fault.what: fault.name for fault in _faults()}
    found: dict[str, dict[str, float]] = {}
    for what, values in re.findall(r"^\| (.+?)(?: ⁴)? \|.*\| ([\d.–/< ]+) s \|$", page, re.MULTILINE):
        numbers = zip(COUNTS, values.split(" / "), strict=False)
        if what in names:
            found[names[what]] = {
                count: 0.0 if number == LESS else float(number) for count, number in numbers if number != "–"
            }
    return found


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= MIN_SHOWN_S else LESS


def _date(table: str) -> str:
    dates = re.findall(r"seen (\d{4}-\d\d-\d\d)", table)
    return dates[0] if dates else "never"


def _faults() -> Any:
    spec = importlib.util.spec_from_file_location("table", ROOT / "tests" / "faults" / "table.py")
    assert spec is not None and spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    sys.modules["table"] = table
    spec.loader.exec_module(table)
    return table.FAULTS


def main() -> int:
    """Write the page."""
    page = OUTPUT.read_text(encoding="utf-8")
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    date = measured.pop("date", None)
    seen = seen_on(page)
    for name, counts in measured.items():
        # A fault that is tested at several moments is as slow as its slowest.
        seen.setdefault(name, {}).update({count: max(cases.values()) for count, cases in counts.items()})
    OUTPUT.write_text(render(page, seen, date), encoding="utf-8")
    print(f"wrote {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
