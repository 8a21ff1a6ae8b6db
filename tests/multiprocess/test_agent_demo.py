"""The demo of conversations as `make agent-demo` runs it: a model learns to call a calculator from rewards alone."""

import json
import os
import re
import runpy
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
    # The reward reads the last number alone: a model may learn to say it twice ("It is 18 is 18 is").
    assert re.findall(r"\d+", answer["content"])[-1] == result["content"] and answer["reward"] == 1


@pytest.mark.parametrize(("after", "code"), [(0.81, 0), (0.79, 1)])
def test_the_demo_fails_where_rewards_have_not_risen(after, code, tmp_path, monkeypatch, capsys):
    demo = runpy.run_path(str(ROOT / "examples" / "agent_demo" / "demo.py"))
    turns = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]

    def trained(command, directory, name, *words):
        run = directory / name
        run.mkdir(parents=True, exist_ok=True)
        rewards = [0.1] * 3 + [after] * 10
        lines = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
        row = {"prompt": "What is 1 + 1?", "turns": turns, "reward": 1.0, "generated_text": "It is 2.", "prompt_id": 0}
        rows = [{**row, "step": 1, "rank": "worst"}, {**row, "step": 13, "rank": "best"}]
        for file, records in (("metrics.jsonl", lines), ("rollouts.jsonl", rows)):
            (run / file).write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return 0

    monkeypatch.setattr("sys.argv", ["demo.py", "--directory", str(tmp_path)])
    monkeypatch.setitem(demo["main"].__globals__, "train", trained)
    monkeypatch.setitem(demo["main"].__globals__, "write_data", lambda directory: None)
    assert demo["main"]() == code
    assert ("expected at most 0.2 and then at least 0.8" in capsys.readouterr().out) == bool(code)
