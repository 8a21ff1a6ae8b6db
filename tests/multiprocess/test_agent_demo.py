"""The demo of conversations as `make agent-demo` runs it: a model learns to call a calculator from rewards alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.report import read_jsonl
from tests.multiprocess.launcher import OPTIMISED

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
EIGHT_MINUTES = 480.0


@pytest.mark.nightly
def test_the_demo_learns_to_call_the_calculator_and_to_use_its_result(tmp_path):
    command = [sys.executable, "examples/agent_demo/demo.py", "--directory", str(tmp_path / "demo")]
    environment = os.environ | OPTIMISED
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=EIGHT_MINUTES)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = [row for row in read_jsonl(tmp_path / "demo" / "agent" / "rollouts.jsonl") if row["rank"] == "best"][-1]
    question, call, result, answer = last["turns"]
    numbers = re.findall(r"\d+", question["content"])
    assert [turn["role"] for turn in last["turns"]] == ["user", "assistant", "tool", "assistant"]
    assert re.findall(r"\d+", call["content"]) == numbers and result["content"] == str(sum(map(int, numbers)))
    assert answer["content"] == f"It is {result['content']}." and answer["reward"] == 1
