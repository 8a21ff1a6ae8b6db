"""The page of the faults that are tested, from tests/faults/table.py and what the tests measured.

scripts/docs_site.py puts it into the site. Run as a program it takes the seconds of the last test run, in
build/fault-seconds.json, over into tests/faults/seconds.json; a fault that was not run keeps those it has.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "build" / "fault-seconds.json"
KEPT = ROOT / "tests" / "faults" / "seconds.json"
MIN_SHOWN_S, LESS = 0.05, "< 0.1"
"""The shortest time in seconds that is shown as a number, and the text for a shorter one."""

HEAD = """\
# Faults

Made by `scripts/make_fault_docs.py`. A fault ends in one of these ways, within a deadline:

- **training goes on**, bit for bit as without the callback: the round is skipped on every host, or only its report is
  incomplete on the leader;
- **training stops in order**: after the same step on every host, with a save where one is configured; a save that has
  begun is finished;
- **every process exits**, because a host is lost or the hosts are not the same program.

Each row is a test in `tests/faults`, on 2 processes; those with ⁴ also on 4, because more than one peer matters there
(in `make nightly`; the launch of one host, and deaths during generation, in `make slow`). The text is a part of what
the user reads; where every process exits, it is in the log of every process that lived. The limit is what the test
allows, twice that on 4 processes. The last column is what it measured on 2 / 4 processes that shared two cores with
other programs: seconds from the fault until every host is back in training or has ended, the round and its compiling
included, with `timeout_s` of 2 s where a wait must run out (300 s by default). The row of the other configuration
file counts from the start of the processes. [The protocol](protocol.md) says how each is found.

"""


def render() -> str:
    """The whole page."""
    seen = kept()
    lines = [
        f"| fault | how it ends | what the user reads | limit in the test | seen {seen['date']} |",
        "|---|---|---|---:|---:|",
    ]
    for fault in _faults():
        mark = " ⁴" if fault.on_four else ""
        sees = f"… {fault.sees} …".replace("|", "\\|") if fault.sees else "nothing"
        found = seen.get(fault.name, {})
        shown = [_shown(found[count]) if count in found else "–" for count in ("2", "4")[: 1 + fault.on_four]]
        lines.append(f"| {fault.what}{mark} | {fault.ends} | {sees} | {fault.deadline_s:g} s | {' / '.join(shown)} s |")
    return HEAD + "\n".join(lines) + "\n"


def kept() -> dict[str, Any]:
    """The seconds by fault and number of processes, and the date of the last measurement."""
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= MIN_SHOWN_S else LESS


def _faults() -> Any:
    spec = importlib.util.spec_from_file_location("table", ROOT / "tests" / "faults" / "table.py")
    assert spec is not None and spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    sys.modules["table"] = table
    spec.loader.exec_module(table)
    return table.FAULTS


def main() -> int:
    """Take over what was measured."""
    seen, measured = kept(), json.loads(MEASURED.read_text(encoding="utf-8"))
    seen["date"] = measured.pop("date")
    for name, counts in measured.items():
        # A fault that is tested at several moments is as slow as its slowest.
        seen.setdefault(name, {}).update({count: max(cases.values()) for count, cases in counts.items()})
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in seen.items())
    KEPT.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    print(f"wrote {KEPT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
