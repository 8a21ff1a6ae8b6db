"""All scripts of this folder that end, one after the other in one job: one start shows all findings."""

import runpy
from pathlib import Path

HERE = Path(__file__).parent

for script in sorted(HERE.glob("*.py")):
    if script.stem not in ("all", "pod", "some_enter"):
        runpy.run_path(str(script), run_name="__main__")
