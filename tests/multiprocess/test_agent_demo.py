"""The demo of conversations as `make agent-demo` runs it: a model learns to call a calculator from rewards alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.report import read_jsonl
from tests.multiprocess.launcher import OPTIMISED, cache_environment

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
EIGHT_MINUTES = 480.0


def run(directory, *options):
    """The demo's exit code and what it has printed; it launches its processes itself."""
    command = [sys.executable, "examples/agent_demo/demo.py", "--directory", str(directory), *options]
    environment = os.environ | (cache_environment() if options else OPTIMISED)  # what is short is mostly compiled
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended = subprocess.run(command, **streams, text=True, cwd=ROOT, env=environment, timeout=EIGHT_MINUTES, check=False)
    return ended.returncode, ended.stdout


@pytest.mark.nightly  # in make slow: conversations with tools in test_conversations.py
def test_a_demo_that_is_too_short_to_learn_says_so_and_ends_with_1(tmp_path):
    code, output = run(tmp_path / "demo", "--chat_steps", "2", "--steps", "2")
    assert code == 1 and "expected at most 0.2 and then at least 0.8" in output, output
    assert re.search(r"before: one of the worst conversations of step 1, reward 0\nuser: What is \d+ \+ \d+\?", output)
    page = (tmp_path / "demo" / "agent" / "report.html").read_text(encoding="utf-8")
    assert f"{tmp_path}/demo/agent/report.html: " in output and '"speaker":"assistant"' in page


@pytest.mark.nightly
def test_the_demo_learns_to_call_the_calculator_and_to_use_its_result(tmp_path):
    code, output = run(tmp_path / "demo")
    assert code == 0, output
    last = [row for row in read_jsonl(tmp_path / "demo" / "agent" / "rollouts.jsonl") if row["rank"] == "best"][-1]
    question, call, result, answer = last["turns"]
    numbers = re.findall(r"\d+", question["content"])
    assert [turn["role"] for turn in last["turns"]] == ["user", "assistant", "tool", "assistant"]
    assert re.findall(r"\d+", call["content"]) == numbers and result["content"] == str(sum(map(int, numbers)))
    assert answer["content"] == f"It is {result['content']}." and answer["reward"] == 1
