"""The examples as their docstrings start them, on two real processes, with few steps."""

import json
import re
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lockstep.report import read_jsonl
from tests import wandb_run
from tests.multiprocess.harness import run_command

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly  # in make test: test_own_models.py
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


@pytest.mark.nightly  # in make slow: our hook in test_levanter.py
@pytest.mark.parametrize("name", ["train_lm", "train_dpo"])
def test_levanter_with_our_block_in_its_yaml(name, tmp_path):
    """Its data caches, its configuration, its trainer, on two processes; and resumed."""
    arguments = ["--config_path", f"examples/levanter_{name}.yaml", "--trainer.id", "test"]
    arguments += ["--data.cache_dir", str(tmp_path / "cache"), "--trainer.log_dir", str(tmp_path)]
    arguments += ["--trainer.checkpointer.base_path", str(tmp_path / "checkpoints")]
    arguments += ["--inference_eval.eval_every", "2", "--inference_eval.max_new_tokens", "3"]
    for steps, shown, not_shown in ((4, (2, 4), (6,)), (6, (6,), (2, 4))):
        command = ["python", f"examples/levanter_{name}.py", *arguments, "--trainer.num_train_steps", str(steps)]
        run = run_command(command, cwd=ROOT, timeout_s=240)
        assert run.code == 0, run.output
        leader, other = run.logs
        assert all(f"what the model says after {step} steps" in leader for step in shown)
        assert not any(f"what the model says after {step} steps" in leader for step in not_shown)
        assert "generated text" not in other
        assert "skipped on every host" not in leader and "failed on the leader" not in leader


@pytest.mark.nightly
def test_levanter_on_a_pod_reads_only_the_bucket_and_what_is_synced(checkpoint, tmp_path):
    """The file for 32 chips on 32 simulated devices of two processes; a directory in place of gs://YOUR_BUCKET."""
    bucket, worker = tmp_path / "bucket", tmp_path / "worker"
    shutil.copytree(checkpoint, bucket / "models" / "Meta-Llama-3-8B-Instruct")
    shutil.copytree(ROOT / "examples", worker / "examples")
    pairs = [json.loads(line) for line in (ROOT / "data/preferences/sums.jsonl").read_text().splitlines()]
    data = bucket / "data" / "ultrafeedback_binarized"
    data.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), data / "train_prefs-00000-of-00001.parquet")
    file = worker / "examples" / "levanter_train_lm_v5p_64.yaml"
    file.write_text(file.read_text().replace("gs://YOUR_BUCKET", str(bucket)))
    assert "gs://" not in file.read_text() and "data/preferences" not in file.read_text()
    command = ["python", "examples/levanter_train_lm.py", "--config_path", "examples/levanter_train_lm_v5p_64.yaml"]
    command += ["--trainer.id", "levanter-1", "--trainer.require_accelerator", "false"]
    refused = run_command([*command, "--trainer.train_batch_size", "16"], cwd=worker, devices=16, timeout_s=100)
    assert refused.code == 1 and "ZeroDivisionError" not in refused.output
    assert "train_batch_size is 16, but each batch is split over 32 devices. Set it to a multiple" in refused.output
    sizes = json.loads((checkpoint / "config.json").read_text())
    for name, theirs in {
        "hidden_dim": "hidden_size",
        "intermediate_dim": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
    }.items():
        command += [f"--model.{name}", str(sizes[theirs])]
    command += [
        "--model.max_seq_len",
        "64",
        "--inference_eval.max_seq_len",
        "64",
        "--inference_eval.max_new_tokens",
        "4",
    ]
    command += ["--trainer.train_batch_size", "32", "--trainer.per_device_parallelism", "1"]
    command += ["--trainer.num_train_steps", "2", "--inference_eval.eval_every", "2"]
    command += ["--trainer.tracker", "{mode: offline}"]
    run = run_command(command, cwd=worker, devices=16, timeout_s=300)
    assert run.code == 0, run.output
    assert "16 of 32 devices are local" in run.logs[1]
    assert "skipped on every host" not in run.logs[0] and "failed on the leader" not in run.logs[0]
    assert {path.name for path in bucket.iterdir()} == {"models", "data", "cache", "checkpoints"}
    assert list((bucket / "checkpoints" / "levanter" / "levanter-1").glob("step-*"))
    (offline,) = (worker / "wandb").glob("offline-run-*")
    (table,) = wandb_run.tables(offline, "inference_eval/samples")
    assert len(table["data"]) == 3


@pytest.mark.nightly  # in make test: test_own_models.py
@pytest.mark.parametrize("name", ["dict_loop", "nnx_loop"])
def test_models_of_ones_own_are_read_on_two_hosts(name, tmp_path):
    arguments = ["--steps", "4", "--eval_every", "2", "--output_dir", str(tmp_path)]
    run = run_command(["python", f"examples/{name}.py", *arguments], cwd=ROOT, timeout_s=180)
    assert run.code == 0, run.output
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert [(row["step"], row["prompt_id"]) for row in rows] == [(s, p) for s in (2, 4) for p in range(2)]
    assert "skipped on every host" not in run.logs[0] and "failed on the leader" not in run.logs[0]


@pytest.mark.nightly  # in make slow: unit/tunix/test_rollout.py
def test_tunix_sft_samples_on_two_hosts(tmp_path):
    arguments = ["--steps", "4", "--eval_every", "3", "--output_dir", str(tmp_path)]
    run = run_command(["python", "examples/tunix_sft.py", *arguments], cwd=ROOT, timeout_s=240)
    assert run.code == 0, run.output
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert [(row["step"], row["prompt_id"]) for row in rows] == [(s, p) for s in (0, 3, 4) for p in range(2)]
    leader, other = run.logs
    assert "generated text" in leader and "generated text" not in other
    assert "skipped on every host" not in leader and "failed on the leader" not in leader


@pytest.mark.nightly
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 2)])
def test_tunix_grpo_learns_with_our_rollout(processes, devices, tmp_path):
    arguments = ["--steps", "12", "--eval_every", "5", "--output_dir", str(tmp_path)]
    command = ["python", "examples/tunix_grpo.py", *arguments]
    run = run_command(command, cwd=ROOT, processes=processes, devices=devices, timeout_s=600)
    assert run.code == 0, run.output
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert [row["step"] for row in rows] == [0, 5, 10, 12]
    rewards = {re.findall(r"mean reward ([0-9.]+) at first, ([0-9.]+) at last", log)[0] for log in run.logs}
    assert len(rewards) == 1, "every process has all answers"
    first, last = map(float, rewards.pop())
    assert last > first + 0.1, run.output
