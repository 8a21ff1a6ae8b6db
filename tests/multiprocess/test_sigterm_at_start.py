"""SIGTERM while a model is loaded or made: every process ends with code 143 and says who was asked to, and where."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.multiprocess.launcher import LAUNCHER, REPOSITORY, cache_environment
from tests.multiprocess.stalled import STALLED
from tests.multiprocess.test_sample_kills import children, write_config

pytestmark = pytest.mark.multiprocess

LIMIT_S = 120.0
TRAIN = ["train-lm", "--config_path", "config/demo.yaml", "--trainer.tracker", "{type: noop}"]


def demo_from(checkpoint: Path, directory: Path) -> list[str]:
    """The demo's training, from a checkpoint in place of scratch."""
    values = yaml.safe_load((REPOSITORY / "config" / "demo.yaml").read_text())
    del values["model"]
    values["initialize_from_hf"] = str(checkpoint)
    path = directory / "train.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["train-lm", "--config_path", str(path), "--trainer.tracker", "{type: noop}"]


def sampling(checkpoint: Path, directory: Path) -> list[str]:
    return ["sample", "--config_path", str(write_config(directory / "sample.yaml", checkpoint, "run"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "arguments", "victim", "phase"),
    [
        ("loading", sampling, 0, "loading the checkpoint"),
        pytest.param("loading", demo_from, 1, "loading the checkpoint", marks=pytest.mark.nightly),
        ("making", lambda *_: TRAIN, 1, "making the model"),
    ],
    ids=["the one that reads, sample", "one that waits, training", "made"],
)
def test_sigterm_ends_every_process(where, arguments, victim, phase, checkpoint, tmp_path):
    command = [sys.executable, str(LAUNCHER), "--processes", "2", "--devices_per_process", "2"]
    command += [
        "--grace_s",
        "600",
        "--",
        "python",
        "-m",
        "tests.multiprocess.stalled",
        where,
        *arguments(checkpoint, tmp_path),
    ]
    log = tmp_path / "log"
    with log.open("wb") as file:
        job = subprocess.Popen(
            command if arguments is sampling else [*command, "--trainer.log_dir", str(tmp_path / "runs")],
            env={**os.environ, **cache_environment()},
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + LIMIT_S
        while log.read_text().count(STALLED) < (2 if where == "making" else 1):
            assert job.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        time.sleep(0.5)  # until the other one waits
        os.kill(children(job.pid)[victim], signal.SIGTERM)
        code = job.wait(timeout=LIMIT_S)
    finally:
        job.kill()
    text = log.read_text()
    assert code == 143, text
    assert f"process {victim} of 2 was asked to end (SIGTERM) in phase '{phase}'" in text
    assert f"process {1 - victim} ends because process {victim} was asked to end (SIGTERM)" in text
    assert "Traceback" not in text
