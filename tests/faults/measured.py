"""The seconds that the fault tests measured, kept in the build tree for scripts/make_fault_docs.py."""

import datetime
import json
from pathlib import Path

FILE = Path(__file__).parents[2] / "build" / "fault-seconds.json"


def record(fault, processes, seconds, case=""):
    """Note how long a fault took from its strike to its end, in one of its cases."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    found.setdefault(fault, {}).setdefault(str(processes), {})[case] = round(seconds, 2)
    found["date"] = str(datetime.date.today())
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(found, indent=1))
