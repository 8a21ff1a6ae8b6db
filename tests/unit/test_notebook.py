"""The notebook of examples/, executed cell by cell as Jupyter does, in a process of its own on the CPU."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_samples.ipynb"
RUN = """
import ast, json, sys

names = {"__name__": "__main__"}
for number, source in enumerate(json.load(open(sys.argv[1]))):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), names)
    value = None if last is None else eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
print("SHOWN", value._repr_html_())
"""
"""A kernel's way with cells: one namespace, and the value of the last line is shown."""


def sources() -> list[str]:
    """The cells of code."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell["source"] for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_a_clean_one():
    """Without outputs of somebody's run, and of plain Python, which other tools read too."""
    whole = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in whole["cells"]}) == len(whole["cells"])
    for cell in whole["cells"]:
        assert cell["cell_type"] == "markdown" or not cell["outputs"] and cell["execution_count"] is None
    assert all(ast.parse(source).body for source in sources())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_cell_runs_and_the_report_is_shown(tmp_path):
    (tmp_path / "cells.json").write_text(json.dumps(sources()))
    one_device = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1")
    done = subprocess.run(
        [sys.executable, "-c", RUN, "cells.json"],
        cwd=tmp_path,
        env={**os.environ, "STEPS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": one_device},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "lockstep-demo/runs/notebook/report.html").exists()
    before, _, shown = done.stdout.partition("SHOWN ")
    assert shown.startswith("<iframe srcdoc=") and "in words?" in shown
    table = before.partition("What is ")[2]
    assert "    0 '" in table and "    1 '" in table, before
