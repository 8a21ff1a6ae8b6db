"""The log of a training command: the lines that the documentation promises, from the leader, each once."""

import re
from pathlib import Path

import pytest

from tests.multiprocess.harness import run_command
from tests.multiprocess.lm_run import write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]  # in make slow: logs in test_train_simpo.py

ROOT = Path(__file__).parents[2]
OF_EVERY_START = [
    r"^lockstep\.training\.data\.build: .* of it padding",
    r"^lockstep\.training\.run\.run: [\d,]+ parameters on mesh \(.*; run directory .*/logged$",
]
PROMISED = {
    "never": [*OF_EVERY_START, r"^lockstep\.training\..*: checkpoint .*/step-3 saved in [\d.]+ s$"],
    "must": [*OF_EVERY_START, r"^lockstep\.training\..*: the run goes on from step 3: .*/step-3$"],
}
"""By ``trainer.resume``."""


def test_the_leader_says_what_the_pages_promise(tmp_path):
    config = write_config(tmp_path, "logged", 3)
    for resume, lines in PROMISED.items():
        command = ["lockstep", "train-lm", "--config_path", str(config), "--resume", resume]
        run = run_command(command, cwd=ROOT, devices=1, timeout_s=240)
        assert run.code == 0, run.output
        leader, other = run.logs
        for line in lines:
            assert len(re.findall(line, leader, re.MULTILINE)) == 1, f"{line}\n{leader}"
            assert not re.search(line, other, re.MULTILINE), other
