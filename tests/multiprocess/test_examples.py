"""The examples as their docstrings start them, on two real processes, with few steps."""

from pathlib import Path

import pytest
from harness import run_command

from lockstep.report import read_jsonl

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]


def test_a_loop_of_ones_own_samples_on_two_hosts(tmp_path):
    arguments = ["--steps", "4", "--eval_every", "2", "--output_dir", str(tmp_path)]
    run = run_command(["python", "examples/own_loop.py", *arguments], cwd=ROOT, timeout_s=180)
    assert run.code == 0, run.output
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert [(row["step"], row["prompt_id"]) for row in rows] == [(s, p) for s in (2, 4) for p in range(3)]
    assert all(row["num_tokens"] >= 1 and row["exact_match"] == 0 for row in rows)
    leader, other = run.logs
    assert "what the model says after 4 steps" in leader and "generated text" in leader
    assert "generated text" not in other
    assert "skipped" not in leader and "failed" not in leader
