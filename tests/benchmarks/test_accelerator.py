"""What is measured on an accelerator: that it all runs, and that what fails is written down and hides nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import accelerator
from benchmarks.accelerator import Section, counts, failures, file_name, findings, measure

ROOT = Path(__file__).parents[2]


def section(code: str, limit_s: float = 600) -> Section:
    return Section(arguments=("-S", "-c", code), limit_s=limit_s)


def test_a_section_that_fails_is_an_error_with_its_last_words_and_the_others_go_on(tmp_path):
    figures = 'print("figures " + \'{"device": "NVIDIA H100 80GB HBM3", "decode_step_s": 0.5}\')'
    parts = {
        "failing": section("import sys; print('half'); sys.exit('out of memory')"),
        "late": section("import time; print('begun', flush=True); time.sleep(600)", limit_s=1),
        "good": section(figures),
    }
    rows = measure(parts, tmp_path, 600)
    assert failures(rows) == ["failing", "late"]
    assert "out of memory" in rows["failing"]["error"] and "not over after 1 s" in rows["late"]["error"]
    assert rows["good"]["decode_step_s"] == 0.5
    assert file_name(rows, False).endswith("-accelerator-nvidia-h100-80gb-hbm3.json")


def test_no_section_begins_when_the_time_is_over(tmp_path):
    rows = measure({"one": section("print(1)")}, tmp_path, 0)
    assert rows["one"]["error"] == "not begun: 0 s were over" and failures(rows) == ["one"]


def test_outcomes_are_those_that_pytest_and_doctor_count():
    output = "FAILED tests/a.py::one[x] - boom\nERROR tests/b.py\n=== 2 failed, 7 passed, 39 skipped, 1 error in 3s ==="
    assert counts(output) == {
        "failed": 2, "passed": 7, "skipped": 39, "error": 1, "failures": ["tests/a.py::one[x]", "tests/b.py"],
    }  # fmt: skip
    lines = [{"name": "memory", "outcome": outcome, "text": outcome} for outcome in ("ok", "ok", "warning", "fix")]
    assert findings({"sections": {"a": lines[:2], "b": lines[2:]}}) == {
        "ok": 2, "warning": ["memory: warning"], "fix": ["memory: fix"],
    }  # fmt: skip


def test_the_sections_fit_the_time_and_hold_the_shapes_of_1b_and_8b(tmp_path):
    parts = accelerator.sections(False, tmp_path)
    assert list(parts)[:2] == ["llama-3.2-1b", "llama-3.1-8b"] and accelerator.WHOLE_S <= 360
    assert {"grpo", "doctor", "tests"} < set(parts)
    for path in accelerator.ENGINE_TESTS:
        assert (ROOT / path).exists(), path


@pytest.mark.nightly
def test_the_script_runs_every_section_on_a_cpu(tmp_path):
    environment = {**os.environ, "RESULTS": str(tmp_path), "PYTHON": sys.executable}
    environment["XLA_FLAGS"] = environment["XLA_FLAGS"].replace("device_count=4", "device_count=1")
    command = [str(ROOT / "scripts" / "on_accelerator.sh"), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (file,) = tmp_path.glob("*-accelerator-quick-cpu.json")
    rows = json.loads(file.read_text())
    tiny = rows["tiny"]
    assert tiny["decode_step_s"] > 0 and 0 < tiny["decode_best_s"] and 0 < tiny["prefill_best_s"] and rows["run"]
    assert len(rows["grpo"]["first_steps_s"]) == 2 and rows["grpo"]["update_s"] > 0
    assert rows["doctor"]["ok"] > 5 and not rows["doctor"]["fix"] and rows["tests"]["passed"] > 5
