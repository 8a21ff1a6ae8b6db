"""Write the table of faults in docs/reliability.md from tests/faults/table.py."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: scripts/make_reliability_docs.py -->", "<!-- end of table -->"


def render(page: str) -> str:
    """The page with its table made anew.

    Args:
        page: with both marks.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| fault | how it ends | what the user reads | limit in the test |", "|---|---|---|---:|"]
    for fault in _faults():
        mark = " ⁴" if fault.on_four else ""
        sees = f"… {fault.sees} …".replace("|", "\\|") if fault.sees else "nothing, or the system's own words"
        lines.append(f"| {fault.what}{mark} | {fault.ends} | {sees} | {fault.deadline_s:g} s |")
    return before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after


def _faults() -> Any:
    spec = importlib.util.spec_from_file_location("table", ROOT / "tests" / "faults" / "table.py")
    assert spec is not None and spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    sys.modules["table"] = table
    spec.loader.exec_module(table)
    return table.FAULTS


def main() -> int:
    """Write the page."""
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
