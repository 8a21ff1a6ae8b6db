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
from harness import LAUNCHER, cache_environment
from test_sample import checkpoint  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROMPTS, GENERATIONS = 60, 2
LIMIT_S = 150.0


def command(config, processes):
    return [
        *(sys.executable, str(LAUNCHER), "--backend", "local", "--processes", str(processes)),
        *("--devices_per_process", "2", "--grace_s", "1", "--", "lockstep", "sample", "--config_path", str(config)),
    ]


def start(config, processes, log):
    return subprocess.Popen(
        command(config, processes), env={**os.environ, **cache_environment()}, stdout=log, stderr=subprocess.STDOUT
    )


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rows(directory):
    return sum(path.read_bytes().count(b"\n") for path in directory.glob("samples-host-*.jsonl"))


def kill_after(config, processes, count, whom, log, directory):
    """Starts a run and kills ``whom`` (a process number, or all) once ``count`` rows are on disk."""
    job = start(config, processes, log)
    end = time.monotonic() + LIMIT_S
    while rows(directory) < count and job.poll() is None:
        assert time.monotonic() < end, "no rows came"
        time.sleep(0.01)
    workers = children(job.pid) if job.poll() is None else []
    for worker in workers if whom == "all" else workers[whom : whom + 1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    code = job.wait(timeout=LIMIT_S)
    return code


def write_config(path, checkpoint, run_id, **values):  # noqa: F811
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


@pytest.mark.parametrize("mode", ["host_data_parallel", "global_mesh"])
def test_whatever_is_killed_whenever_every_row_comes_out_once(mode, checkpoint, tmp_path):  # noqa: F811
    draw = random.Random(mode)
    with open(tmp_path / "log", "w+") as log:
        whole = write_config(tmp_path / "whole.yaml", checkpoint, "whole", inference_mode=mode)
        assert start(whole, 1, log).wait(timeout=LIMIT_S) == 0, (tmp_path / "log").read_text()
        killed = write_config(tmp_path / "killed.yaml", checkpoint, "killed", inference_mode=mode)
        directory, total = tmp_path / "killed" / "samples", PROMPTS * GENERATIONS
        last = 0
        for processes, whom in [(2, 1), (4, "all"), (1, "all"), (2, 0), (4, 3)]:
            before = rows(directory) if directory.exists() else 0
            assert before >= last, "what was on disk stays there"
            last = before
            aim = min(total - 6, before + draw.randint(1, total // 6))
            code = kill_after(killed, processes, aim, whom, log, directory)
            assert code != 0 or rows(directory) == total, (tmp_path / "log").read_text()[-6000:]
        assert start(killed, 2, log).wait(timeout=LIMIT_S) == 0, (tmp_path / "log").read_text()[-6000:]
    merged = (directory / "samples.jsonl").read_bytes()
    assert merged == (tmp_path / "whole" / "samples" / "samples.jsonl").read_bytes()
    assert merged.count(b"\n") == total
    written = [line for path in directory.glob("samples-host-*.jsonl") for line in path.read_bytes().splitlines()]
    assert len(written) == len(set(written)) == total, "no row was generated twice"
