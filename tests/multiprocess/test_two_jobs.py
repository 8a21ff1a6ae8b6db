"""Two jobs with one ``run_id`` at the same time: the second is refused by name, and the first goes on as without it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess.launcher import cache_environment
from tests.multiprocess.lm_run import checkpoints, losses, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
STEPS = 1_000_000  # none of the two comes to its end


def test_the_second_is_refused_and_the_first_goes_on_as_without_it(tmp_path):
    config = write_config(tmp_path, "shared", STEPS)
    lockstep = Path(sys.executable).with_name("lockstep")
    command = [lockstep, "train-lm", "--config_path", str(config), "--inference_eval.enabled", "false"]
    options = {
        "cwd": ROOT,
        "env": os.environ | cache_environment(),
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    first = subprocess.Popen(command, **options, text=True)
    try:
        end = time.monotonic() + 240
        while not (tmp_path / "shared" / "metrics.jsonl").exists():
            assert first.poll() is None and time.monotonic() < end, first.communicate()[0]
            time.sleep(0.05)
        second = subprocess.run(command, **options, text=True, timeout=240)
        assert first.poll() is None, "the first was still training when the second was refused"
        assert second.returncode != 0 and f"process {first.pid} on " in second.stdout, second.stdout
        assert "another job writes there now" in second.stdout
        first.terminate()
        output, _ = first.communicate(timeout=240)
        assert first.returncode == 128 + signal.SIGTERM, output
    finally:
        first.kill()
    steps = len(losses(tmp_path / "shared"))  # which looks that each is there once
    assert checkpoints(tmp_path / "shared")[-1] == steps
    assert not (tmp_path / "shared" / "lease.json").exists()
