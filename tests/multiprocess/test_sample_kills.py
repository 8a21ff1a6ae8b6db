"""``lockstep sample`` killed at random moments, one process or all, and started again on another number of hosts."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests import fake_gcs
from tests.multiprocess.launcher import LAUNCHER, cache_environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROMPTS, GENERATIONS = 60, 2
LIMIT_S = 150.0


def command(config, processes, grace_s):
    return [
        *(sys.executable, str(LAUNCHER), "--backend", "local", "--processes", str(processes)),
        *("--devices_per_process", "2", "--grace_s", str(grace_s), "--"),
        *("lockstep", "sample", "--config_path", str(config)),
    ]


def start(config, processes, log, grace_s=1):
    environment = {**os.environ, **cache_environment()}
    words = command(config, processes, grace_s)
    return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def rows(directory):
    return sum(path.read_bytes().count(b"\n") for path in directory.glob("samples-host-*.jsonl"))


def rows_of(bucket):
    kept = [data for name, data in list(bucket.objects.items()) if "/samples-host-" in name]
    return sum(data.count(b"\n") for data in kept)


def kill_after(config, processes, count, whom, log, written):
    """Starts a run and kills ``whom`` (a process number, or all) once ``count`` rows are written."""
    job = start(config, processes, log)
    end = time.monotonic() + LIMIT_S
    while written() < count and job.poll() is None:
        assert time.monotonic() < end, "no rows came"
        time.sleep(0.01)
    workers = children(job.pid) if job.poll() is None else []
    for worker in workers if whom == "all" else workers[whom : whom + 1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    code = job.wait(timeout=LIMIT_S)
    return code


def write_config(path, checkpoint, run_id, **values):
    config = {
        "hf_checkpoint": str(checkpoint),
        "trainer": {"log_dir": str(path.parent), "run_id": run_id, "tracker": {"type": "noop"}},
        "prompts": [f"What is {i} plus {i % 7}?" + " And why?" * (i % 4) for i in range(PROMPTS)],
        "n_generations": GENERATIONS,
        "max_new_tokens": 16,
        "temperature": 1.0,
        "ignore_eos": True,
        "max_prompts_per_batch": 2,
        "metrics": ["length"],
        "skip_samples_table": True,
        **values,
    }
    path.write_text(yaml.safe_dump(config))
    return path


KILLS = [(2, 1), (4, "all"), (1, "all"), (2, 0), (4, 3), (2, "all")]
"""Processes, and which of them is killed: all of two when all rows are there, while they are gathered and merged."""


@pytest.mark.nightly  # in make slow: a run that is cut off in test_sample.py
@pytest.mark.parametrize("mode", ["host_data_parallel", "global_mesh"])
def test_whatever_is_killed_whenever_every_row_comes_out_once(mode, checkpoint, tmp_path):
    draw = random.Random(mode)
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        whole = write_config(tmp_path / "whole.yaml", checkpoint, "whole", inference_mode=mode)
        assert start(whole, 1, log).wait(timeout=LIMIT_S) == 0, (tmp_path / "log").read_text()
        killed = write_config(tmp_path / "killed.yaml", checkpoint, "killed", inference_mode=mode)
        directory, total = tmp_path / "killed" / "samples", PROMPTS * GENERATIONS
        last = 0
        for processes, whom in KILLS:
            before = rows(directory)
            assert before >= last, "what was on disk stays there"
            last = before
            aim = min(total - 6, before + draw.randint(1, total // 6)) if whom != "all" or processes != 2 else total
            code = kill_after(killed, processes, aim, whom, log, lambda: rows(directory))
            assert code != 0 or rows(directory) == total, (tmp_path / "log").read_text()[-6000:]
        assert start(killed, 1, log).wait(timeout=LIMIT_S) == 0, (tmp_path / "log").read_text()[-6000:]
    merged = (directory / "samples.jsonl").read_bytes()
    assert merged == (tmp_path / "whole" / "samples" / "samples.jsonl").read_bytes()
    assert merged.count(b"\n") == total
    written = [line for path in directory.glob("samples-host-*.jsonl") for line in path.read_bytes().splitlines()]
    assert len(written) == len(set(written)) == total, "no row was generated twice"


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["host_data_parallel", "global_mesh"])
def test_rows_in_a_bucket_outlive_the_machines(mode, checkpoint, tmp_path, monkeypatch):
    """As above, but every run begins on machines that have nothing on their disks."""
    draw, total = random.Random(mode), PROMPTS * GENERATIONS
    with open(tmp_path / "log", "w+", encoding="utf-8") as log, fake_gcs.serve() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        whole = write_config(tmp_path / "whole.yaml", checkpoint, "whole", inference_mode=mode)
        assert start(whole, 1, log).wait(timeout=LIMIT_S) == 0, (tmp_path / "log").read_text()

        def config(run_id):
            values = {"inference_mode": mode, "host_data_parallel_output_dir": "gs://bucket/rows"}
            return write_config(tmp_path / f"{run_id}.yaml", checkpoint, run_id, **values)

        for attempt, (processes, whom) in enumerate([(2, 1), (4, "all"), (1, "all"), (2, 0)]):
            aim = min(total - 6, rows_of(bucket) + draw.randint(1, total // 6))
            kill_after(config(f"attempt-{attempt}"), processes, aim, whom, log, lambda: rows_of(bucket))
        assert 0 < rows_of(bucket) < total
        assert start(config("last"), 2, log).wait(timeout=LIMIT_S) == 0, (tmp_path / "log").read_text()[-6000:]
    assert bucket.objects["bucket/rows/samples.jsonl"] == (tmp_path / "whole/samples/samples.jsonl").read_bytes()
    written = [line for name, data in bucket.objects.items() if "/samples-host-" in name for line in data.splitlines()]
    assert len(written) == len(set(written)) == total, "no row was generated twice"
