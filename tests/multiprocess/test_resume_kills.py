"""``lockstep train-lm`` killed five times at random moments, one process or all, also while it saves.

``python docs/images/make_curves.py kills`` draws what the test leaves in ``starts.json``.
"""

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

from tests.multiprocess.launcher import LAUNCHER, cache_environment
from tests.multiprocess.lm_run import EVERY, checkpoints, losses, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

STEPS = 60
LIMIT_S = 400.0
KILLS = [("all", False), (1, True), (0, False), ("all", True), (1, False)]
"""Who is killed with SIGKILL, and whether while a checkpoint is written; else after some more steps."""


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
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


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
    with open(tmp_path / "log", "w+", encoding="utf-8") as log, contextlib.ExitStack() as ends:

        def finish(config, **options):
            job = start(config, log, **options)
            ends.callback(end, job)
            code = job.wait(timeout=LIMIT_S)
            assert code == 0, (tmp_path / "log").read_text()[-6000:]

        finish(write_config(tmp_path, "whole", STEPS))
        config = write_config(tmp_path, "killed", STEPS)
        starts: list[dict] = []  # what docs/images/make_curves.py draws
        for whom, while_saving in KILLS:
            first = max(checkpoints(run), default=0) + 1
            job = start(config, log)
            ends.callback(end, job)
            before, deadline = lines_of(run), time.monotonic() + LIMIT_S
            aim = min(STEPS - EVERY, max(before - EVERY, 0) + draw.randint(EVERY + 1, 12))
            # A start drops the steps after its checkpoint: they are counted once they come again.
            while job.poll() is None and not (lines_of(run) >= aim and (not while_saving or half_written(run))):
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-6000:]
                time.sleep(0.002)
            kill(job, whom)
            assert lines_of(run) < STEPS, "it ended before it was killed"
            starts.append({"first": first, "losses": list(losses(run).values())[first - 1 :], "killed": whom})
        for processes, _ in ((1, 1), (4, 1)):
            shutil.copytree(run, tmp_path / f"on-{processes}")
        first = max(checkpoints(run)) + 1
        finish(config, resume="must")
        starts.append({"first": first, "losses": list(losses(run).values())[first - 1 :]})
        for processes, devices in ((1, 1), (4, 1)):
            elsewhere = write_config(tmp_path, f"on-{processes}", STEPS)
            finish(elsewhere, processes=processes, devices=devices, resume="must")
    (tmp_path / "starts.json").write_text(json.dumps({"whole": list(losses(whole).values()), "starts": starts}))
    assert losses(run) == losses(whole) and len(losses(whole)) == STEPS
    for each in starts:  # steps that were made again too
        assert each["losses"] == list(losses(whole).values())[each["first"] - 1 :][: len(each["losses"])]
    assert len(starts) == 6 and sum(len(each["losses"]) for each in starts) > STEPS
    assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert (whole / "samples.jsonl").read_bytes().count(b"\n") == 2 * len([*range(7, STEPS, 7), STEPS])
    for processes in (1, 4):
        elsewhere = losses(tmp_path / f"on-{processes}")
        assert len(elsewhere) == STEPS
        np.testing.assert_allclose(list(elsewhere.values()), list(losses(whole).values()), rtol=1e-4)
