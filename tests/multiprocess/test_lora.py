"""Runs that train adapters, on several hosts: they resume, are sampled and exported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.placement import make_mesh
from tests import tiny
from tests.adapters import save_base
from tests.multiprocess.harness import run_processes
from tests.rollouts import EXPERTS, drawn

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SHARED = ["--tokenizer", tiny.TOKENIZER, "--lora.r", "4", "--lora.alpha", "16", "--trainer.run_id", "run"]
SHARED += ["--optimizer.learning_rate", "1e-2", "--optimizer.warmup", "0"]
LM = ["--data.train_urls", "[data/demo/train.jsonl]", "--data.format", "prompt_completion", "--data.max_seq_len", "20"]
LM += ["--trainer.num_train_steps", "4", "--trainer.train_batch_size", "8", "--hf_save_path", "model"]
LM += ["--trainer.checkpointer.every", "2", "--trainer.checkpointer.keep.newest", "9", "--optimizer.ema_decay", "0.5"]
LM += ["--inference_eval.eval_every", "2", "--inference_eval.prompts", '["What is 12 plus 7?"]']
LM += ["--inference_eval.max_new_tokens", "6"]


def run(hosts, cls, *arguments):
    """A training command as its `main` runs it, in processes that are started already."""
    from lockstep.main.arguments import parse_arguments
    from lockstep.training import train

    return train(parse_arguments(cls, [*SHARED, *arguments]), hosts)


def without_the_last_checkpoint(hosts, directory, name):
    """A copy of the run as a kill leaves it."""
    hosts.barrier(f"before {name}")
    if hosts.is_leader:
        shutil.copytree(Path(directory) / "first" / "run", Path(directory) / name / "run")
        shutil.rmtree(Path(directory) / name / "run" / "checkpoints" / "step-4")
    hosts.barrier(f"after {name}")
    return ["--trainer.log_dir", f"{directory}/{name}"]


def body_train(hosts, directory, more):
    """A run, the same from its middle, and samples of what it left."""
    from lockstep.batch_inference import JobConfig, SampleConfig, sample
    from lockstep.training import ExportConfig, TrainLmConfig, export

    base = ["--initialize_from_hf", f"{directory}/base", *LM, *more]
    codes = [run(hosts, TrainLmConfig, *base, "--trainer.log_dir", f"{directory}/first")]
    codes += [run(hosts, TrainLmConfig, *base, *without_the_last_checkpoint(hosts, directory, "again"))]
    given = {"base_model": f"{directory}/base"}  # it is not beside the checkpoints
    export(ExportConfig(checkpoint=f"{directory}/first/run", output=f"{directory}/exported", **given), hosts)
    for name, values in {
        "trained": {"checkpoint_path": f"{directory}/first/run/checkpoints", **given},
        "merged": {"hf_checkpoint": f"{directory}/exported"},
    }.items():
        sample(
            SampleConfig(
                prompts=["What is 12 plus 7?", "and"],
                max_new_tokens=6,
                trainer=JobConfig(log_dir=directory, run_id=name),
                **values,
            ),
            hosts,
        )
    return codes


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path):
    return {line["step"]: line["train/loss"] for line in lines(path / "run" / "metrics.jsonl") if "train/loss" in line}


@pytest.mark.nightly  # in make slow: unit/models/test_lora.py
@pytest.mark.parametrize("experts", [False, True], ids=["mlp", "experts"])
def test_a_run_with_adapters_goes_on_and_is_sampled_and_exported(experts, tmp_path):
    save_base(str(tmp_path / "base"), drawn(EXPERTS, make_mesh("auto")) if experts else None)
    more = ["--lora.target_modules", "[gate_proj,up_proj,down_proj]"] if experts else []
    results = run_processes(body_train, processes=2, devices=2, args=(str(tmp_path), more), timeout_s=400)
    assert results == [[0, 0], [0, 0]]
    first, again = (losses(tmp_path / name) for name in ("first", "again"))
    assert sorted(first) == [1, 2, 3, 4]
    assert again == first, "bit for bit"
    shown = [
        [
            (row["step"], row["generated_text"], row["mean_logprob"])
            for row in lines(tmp_path / name / "run/samples.jsonl")
        ]
        for name in ("first", "again")
    ]
    assert shown[0] == shown[1] and [step for step, *_ in shown[0]] == [2, 4]
    rows = [(tmp_path / name / "samples" / "samples.jsonl").read_text() for name in ("trained", "merged")]
    assert len(rows[0].splitlines()) == 2 and rows[0] == rows[1]
    saved = load_file(tmp_path / "first" / "run" / "model" / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    changed = {name for name in saved if not np.array_equal(saved[name], base[name])}
    if experts:  # but those that no token was given to
        assert changed <= {name for name in saved if "experts" in name}
        assert {name.split(".")[2] for name in changed} == {"0", "1", "2"}, "some of every layer"
    else:
        assert changed == {name for name in saved if "_proj" in name}
