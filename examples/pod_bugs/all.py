"""All scripts of this folder that end, one after the other in one job: one start shows all findings."""

import runpy
from pathlib import Path

HERE = Path(__file__).parent
LAST = [
    "growing",
    "partial_per_step",
    "retrace",
]  # what grows, and what is compiled again, is looked for once training has begun
names = {script.stem for script in HERE.glob("*.py")} - {"all", "pod", "some_enter", *LAST}
for name in (*sorted(names), *LAST):
    runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
