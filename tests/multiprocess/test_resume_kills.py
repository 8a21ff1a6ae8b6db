"""``lockstep train-lm`` killed at random moments, one process or all, also while it saves, and started again."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.multiprocess.launcher import LAUNCHER, cache_environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.nightly]

STEPS, EVERY = 40, 3
LIMIT_S = 400.0
KILLS = [("all", False), (1, True), (0, False), ("all", True)]
"""Who is killed with SIGKILL, and whether while a checkpoint is written; else after some more steps."""


def write_config(directory, run_id):
    config = {
        "trainer": {
            "num_train_steps": STEPS,
            "train_batch_size": 16,
            "log_dir": str(directory),
            "run_id": run_id,
            "checkpointer": {"every": EVERY, "keep": {"newest": 2}},
        },
        "model": {"type": "llama", "max_seq_len": 32, "hidden_dim": 64, "intermediate_dim": 128, "num_layers": 2}
        | {"num_heads": 4, "num_kv_heads": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup": 0.1},
        "tokenizer": "data/demo/tokenizer",
        "data": {"train_urls": ["data/demo/train.jsonl"], "format": "prompt_completion", "max_seq_len": 20},
        "inference_eval": {"eval_every": 7, "prompts": ["What is 12 plus 7?"], "max_new_tokens": 8}
        | {"temperature": 0.9, "n_generations": 2, "on_error": "raise"},
    }
    path = directory / f"{run_id}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(config, log, processes=2, devices=2, resume="auto"):
    words = [sys.executable, str(LAUNCHER), "--backend", "local", "--processes", str(processes)]
    words += ["--devices_per_process", str(devices), "--grace_s", "1", "--"]
    words += ["lockstep", "train-lm", "--config_path", str(config), "--resume", resume]
    return subprocess.Popen(words, env={**os.environ, **cache_environment()}, stdout=log, stderr=subprocess.STDOUT)


def end(job):
    job.terminate()
    try:
        job.wait(10)
    except subprocess.TimeoutExpired:
        job.kill()  # the kernel then kills the processes: launch.die_with_parent


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def losses(run):
    """Loss by step; each step is in the file once."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(each["step"], each["train/loss"]) for each in records if "train/loss" in each]
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return dict(found)


def lines_of(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"train/loss"') if path.exists() else 0


def half_written(run):
    return any(not (step / "metadata.json").exists() for step in run.glob("checkpoints/step-*"))


def kill(job, whom):
    workers = children(job.pid) if job.poll() is None else []
    for worker in workers if whom == "all" else workers[whom : whom + 1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    job.wait(timeout=LIMIT_S)


def test_whoever_is_killed_whenever_losses_and_samples_are_those_of_a_run_without_a_break(tmp_path):
    draw = random.Random(0)
    whole, run = tmp_path / "whole", tmp_path / "killed"
    with open(tmp_path / "log", "w+") as log, contextlib.ExitStack() as ends:

        def finish(config, **options):
            job = start(config, log, **options)
            ends.callback(end, job)
            code = job.wait(timeout=LIMIT_S)
            assert code == 0, (tmp_path / "log").read_text()[-6000:]

        finish(write_config(tmp_path, "whole"))
        config = write_config(tmp_path, "killed")
        for whom, while_saving in KILLS:
            job = start(config, log)
            ends.callback(end, job)
            before, deadline = lines_of(run), time.monotonic() + LIMIT_S
            aim = min(STEPS - EVERY, max(before - EVERY, 0) + draw.randint(EVERY + 1, 8))
            # A start drops the steps after its checkpoint: they are counted once they come again.
            while job.poll() is None and not (lines_of(run) >= aim and (not while_saving or half_written(run))):
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-6000:]
                time.sleep(0.002)
            kill(job, whom)
            assert lines_of(run) < STEPS, "it ended before it was killed"
        for processes, _ in ((1, 1), (4, 1)):
            shutil.copytree(run, tmp_path / f"on-{processes}")
        finish(config, resume="must")
        for processes, devices in ((1, 1), (4, 1)):
            finish(write_config(tmp_path, f"on-{processes}"), processes=processes, devices=devices, resume="must")
    assert losses(run) == losses(whole) and len(losses(whole)) == STEPS
    assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert (whole / "samples.jsonl").read_bytes().count(b"\n") == 2 * len([*range(7, STEPS, 7), STEPS])
    for processes in (1, 4):
        elsewhere = losses(tmp_path / f"on-{processes}")
        assert len(elsewhere) == STEPS
        np.testing.assert_allclose(list(elsewhere.values()), list(losses(whole).values()), rtol=1e-4)
