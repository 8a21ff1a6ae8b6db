"""config/sampler/demo.yaml as its first lines say, from a checkpoint that the demo wrote, and what W&B holds then."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.health import State
from lockstep.report import read_jsonl
from lockstep.report.rows import COLUMNS
from tests import wandb_run
from tests.multiprocess.harness import run_command

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
PROMPTS, ROUNDS, GENERATIONS = 32, 2, 4


def run(*command):
    ended = run_command(["lockstep", *command], timeout_s=600, cwd=ROOT)
    assert ended.code == 0, ended.output
    return ended


def offline_run(run_dir):
    (found,) = run_dir.glob("wandb/offline-run-*")
    return found


def test_the_sampler_of_the_demo_answers_from_the_demos_checkpoint(tmp_path):
    here = ["--trainer.log_dir", str(tmp_path)]
    run(
        *("train-lm", "--config_path", "config/demo.yaml", "--trainer.run_id", "demo", *here),
        *("--trainer.num_train_steps", "10", "--inference_eval.eval_every", "10"),
    )
    trained = offline_run(tmp_path / "demo")
    first, last = wandb_run.tables(trained, "inference_eval/samples")
    assert [{cells[0] for cells in table["data"]} for table in (first, last)] == [{0}, {10}]
    assert len(first["data"]) == len(last["data"]) == PROMPTS
    assert last["columns"] == [*COLUMNS, "exact_match"]
    values = dict(wandb_run.history(trained))[10]
    assert {"train/loss", "inference_eval/tokens_per_second", "inference_eval/exact_match"} <= values.keys()

    ended = run("sample", "--config_path", "config/sampler/demo.yaml", "--checkpoint_path", str(tmp_path), *here)
    sampled = tmp_path / "sample-demo"
    rows = read_jsonl(sampled / "samples" / "samples.jsonl")
    assert [(row["round"], row["prompt_id"], row["generation_id"]) for row in rows] == [
        (r, p, g) for r in range(ROUNDS) for p in range(PROMPTS) for g in range(GENERATIONS)
    ]
    (table,) = wandb_run.tables(offline_run(sampled), "sample/samples")
    assert table["columns"] == "round prompt_id generation_id prompt generated_text num_tokens exact_match".split()
    assert table["data"] == [[row[column] for column in table["columns"]] for row in rows]
    step, values = wandb_run.history(offline_run(sampled))[-1]
    for state in (State.LOOP, State.CUT, State.SPECIAL_TOKEN):
        assert values[f"sample/health/{state}"] == np.mean([state in row["health"].split() for row in rows])
    assert step == values["sample/total_completions"] == len(rows)
    assert values["sample/num_hosts"] == 2 and values["sample/inference_mode"] == "host_data_parallel"
    leader, other = ended.logs
    assert "sample: summary" in leader and "sample: summary" not in other

    again = run("sample", "--config_path", "config/sampler/demo.yaml", "--checkpoint_path", str(tmp_path), *here)
    assert "nothing was left to generate" in again.logs[0]
    assert read_jsonl(sampled / "samples" / "samples.jsonl") == rows
