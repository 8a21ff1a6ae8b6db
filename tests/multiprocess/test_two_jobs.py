"""Two jobs that write into one directory or bucket at the same time: one is refused by name, the other goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.batch_inference.row_files import host_file
from tests import fake_gcs, tiny
from tests.multiprocess.launcher import cache_environment
from tests.multiprocess.lm_run import checkpoints, losses, write_config

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ENDLESS = 1_000_000  # steps: no job of these tests comes to its end
ROUNDS = 20_000  # likewise; sampling parameters of all of them are made at the start
LIMIT_S = 240


def start(*words, environment=None):
    return subprocess.Popen(
        [Path(sys.executable).with_name("lockstep"), *words],
        cwd=ROOT,
        env=os.environ | cache_environment() | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_second_is_refused_and_the_first_goes_on_as_without_it(tmp_path):
    config = write_config(tmp_path, "shared", ENDLESS)
    command = ["train-lm", "--config_path", str(config), "--inference_eval.enabled", "false"]
    first = start(*command)
    try:
        wait_until((tmp_path / "shared" / "metrics.jsonl").exists, first)
        second = start(*command)
        output, _ = second.communicate(timeout=LIMIT_S)
        assert first.poll() is None, "the first was still training when the second was refused"
        assert second.returncode != 0
        assert f"process {first.pid} on " in output and "another job writes there now" in output
        end(first)
    finally:
        first.kill()
    steps = len(losses(tmp_path / "shared"))  # which looks that each is there once
    assert checkpoints(tmp_path / "shared")[-1] == steps
    assert not (tmp_path / "shared" / "lease.json").exists()


@pytest.mark.nightly  # in make slow: the test above, and tests/unit/hosts/test_lease.py
@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_of_two_samplers_that_start_at_once_one_goes_on(place, tmp_path):
    """In the bucket's case each has a run directory of its own, as on two machines."""
    tiny.save_checkpoint(str(tmp_path / "checkpoints"))
    with fake_gcs.serve() as bucket:
        output = str(tmp_path / "rows") if place == "directory" else "gs://bucket/rows"
        jobs = [
            start(
                *("sample", "--checkpoint_path", str(tmp_path / "checkpoints"), "--prompts", "[one, two]"),
                *("--n_rounds", str(ROUNDS), "--max_new_tokens", "4", "--max_prompts_per_batch", "2"),
                *("--host_data_parallel_output_dir", output),
                *("--trainer.log_dir", str(tmp_path), "--trainer.run_id", f"job-{number}"),
                environment=bucket.environment,
            )
            for number in range(2)
        ]
        try:
            wait_until(lambda: any(job.poll() is not None for job in jobs))
            refused = next(job for job in jobs if job.poll() is not None)
            (other,) = set(jobs) - {refused}
            text, _ = refused.communicate()
            assert refused.returncode == 1, text
            assert f"process {other.pid} on " in text and "another job writes there now" in text
            assert "host_data_parallel_output_dir" in text
            run_dir = tmp_path / f"job-{jobs.index(other)}"
            rows = host_file(Path(output) if place == "directory" else run_dir / "samples", 0)
            wait_until(lambda: rows.exists() and rows.stat().st_size > 0, other)
            end(other)
        finally:
            for job in jobs:
                job.kill()
        leases = [name for name in bucket.objects if name.endswith("lease.json")]
    assert not leases and not list(tmp_path.rglob("lease.json"))
    answered = [(row["round"], row["prompt_id"]) for row in map(json.loads, rows.read_text().splitlines())]
    assert answered and len(answered) == len(set(answered))


def wait_until(condition, running=None):
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert running is None or running.poll() is None, running.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)


def end(job):
    job.terminate()
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.SIGTERM, output
