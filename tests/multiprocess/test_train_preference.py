"""`train-preference` with DPO on two hosts: the reference is the first model, also after a resume and with adapters."""

import collections
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.adapters import save_base
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

DPO = ["--config_path", "config/dpo_tiny.yaml", "--trainer.run_id", "run", "--inference_eval.enabled", "false"]
DPO += ["--trainer.num_train_steps", "10", "--trainer.steps_per_eval", "5", "--data.length_buckets", "[20]"]
DPO += ["--data.validation_urls", "[data/preferences/as_asked_held_out.jsonl]", "--trainer.checkpointer.every", "5"]
DPO += ["--trainer.checkpointer.keep.newest", "9"]
ADAPTERS = ["--model", "null", "--lora.r", "4", "--lora.alpha", "16", "--trainer.num_train_steps", "5"]


def body(hosts, directory):
    """A run, the same from its middle, and one with adapters; exit codes and what was launched."""
    from lockstep.main.arguments import parse_arguments
    from lockstep.training import TrainPreferenceConfig, train

    def run(name, *arguments):
        log_dir = Path(directory) / name
        config = parse_arguments(TrainPreferenceConfig, [*DPO, "--trainer.log_dir", str(log_dir), *arguments])
        with record_launches() as launches:
            code = train(config, hosts)
        return code, launches

    found = {"first": run("first")}
    hosts.barrier("first")
    if hosts.is_leader:
        shutil.copytree(f"{directory}/first", f"{directory}/again")
        shutil.rmtree(f"{directory}/again/run/checkpoints/step-10")
    hosts.barrier("again")
    found["again"] = run("again")
    found["adapters"] = run("adapters", *ADAPTERS, "--initialize_from_hf", f"{directory}/base")
    return found


def metrics(path, prefix):
    lines = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}
        for line in lines
        if f"{prefix}loss" in line
    }


@pytest.mark.nightly  # in make slow: test_train_simpo.py
def test_the_reference_is_the_first_model_on_every_host_and_after_a_resume(tmp_path):
    save_base(str(tmp_path / "base"))
    results = run_processes(body, processes=2, devices=2, args=(str(tmp_path),), timeout_s=400)
    assert results[0] == results[1]
    found = results[0]
    assert {name: code for name, (code, _) in found.items()} == {"first": 0, "again": 0, "adapters": 0}

    first, again, adapters = (metrics(tmp_path / name, "train/") for name in ("first", "again", "adapters"))
    for run in (first, adapters):
        assert run[1]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert abs(run[1]["rewards/margins"]) < 1e-5 < run[5]["rewards/margins"]
    assert first[10]["loss"] < first[5]["loss"] < first[1]["loss"] and list(first) == list(range(1, 11))
    assert again == first, "bit for bit"
    held_out = metrics(tmp_path / "first", "eval/")
    assert metrics(tmp_path / "again", "eval/") == held_out and sorted(held_out) == [5, 10]
    assert held_out[5]["loss"] != pytest.approx(math.log(2), abs=1e-6), "the reference of the held-out pairs is there"
    assert np.isfinite([value for figures in held_out.values() for value in figures.values()]).all()

    launches = {
        name: collections.Counter(
            program
            for launched in launches
            for program in ("train_step", "eval_step", "reference_logprobs", "frozen_copy")
            if f"lockstep_{program}" in launched
        )
        for name, (_, launches) in found.items()
    }
    for name, steps in (("first", 10), ("again", 5), ("adapters", 5)):
        assert launches[name]["train_step"] == steps and launches[name]["eval_step"] > 0
        assert launches[name]["reference_logprobs"] == steps + launches[name]["eval_step"]
    assert launches["first"]["frozen_copy"] == launches["again"]["frozen_copy"] == 1
    assert not launches["adapters"]["frozen_copy"], "without its adapters the model is its own reference"
