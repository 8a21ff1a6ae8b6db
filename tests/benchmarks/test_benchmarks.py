"""Every benchmark runs to its end with the smallest sizes, and every figure that it writes is one that was measured."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sizes import SMALLEST

ROOT = Path(__file__).parents[2]
NAMES = [
    ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
]
ARGUMENTS = {
    "admission": "",
    "checkpoint_digests": "--turns 1 --scale 0.05",
    "decode": "--quick",
    "drafts": "--quick --batch 1",
    "exact": "--only bits",
    "experts": "--quick --only engine --only multiprocess",
    "grpo_step": "--quick --only ours --only update --only busy --steps 3",
    "health": "",
    "host_cost": "",
    "job_sizes": "2",
    "levanter_round": "--only ours --rounds 2",
    "logprob_gap": "",
    "published": "",
    "rollout_ahead": "",
    "round_overhead": "",
    "sampler": "--quick --prompts 4 --only global_mesh",
    "token_cache": "--length 16",
    "tokamax_kernels": "--slice v6e-1 --only attention/llama-3-8b/4096/ours",
    "tpu_programs": "--model qwen2.5-0.5b --slice v5p-8 --batch 8 --context 128",
    "tpu_train_step": "--case llama-3-8b --layers 1",
    "train_step": "--quick --steps 2 --layers 1",
}
"""The arguments beside the smallest sizes."""
NIGHTLY = {
    "decode": "its contestants are those of accelerator, which test_accelerator.py runs",
    "drafts": "it decodes as decode does",
    "exact": "it compiles some 900 programs",
    "experts": "engines, and others in two processes",
    "grpo_step": "four processes train",
    "host_cost": "two processes; hosts are in tests/multiprocess",
    "job_sizes": "two processes; test_workers.py has what a host does",
    "levanter_round": "Levanter's start, in two processes",
    "logprob_gap": "it trains a model, and compiles 17 engines",
    "published": "tests/tpu_compile/test_published.py has its rows, in make test",
    "rollout_ahead": "two processes train",
    "round_overhead": "two processes sample",
    "sampler": "it starts a job of two processes",
    "tokamax_kernels": "the TPU compiler takes half a minute, and tokamax is not installed",
    "tpu_programs": "the TPU compiler takes half a minute; tests/tpu_compile/test_programs.py has its functions",
    "tpu_train_step": "the TPU compiler takes a minute for one layer",
    "train_step": "Levanter's start, twice",
}
ELSEWHERE = {
    "accelerator": "tests/benchmarks/test_accelerator.py runs the script of all its sections",
    "grpo.ours": "a contestant of grpo_step",
    "grpo.update": "contestants of grpo_step",
    "grpo.tunix": "a contestant of grpo_step, which --only ours leaves out: tests/unit/tunix has its rollout",
    "spoiled_runs": "tests/benchmarks/test_spoiled_runs.py spoils runs, nightly",
}
ZERO = {
    "checkpoint_digests": "_more",  # the difference of two times
    "decode": "recompiles",
    "exact": "",
    "experts": "multiprocess",  # the difference of two times, which at this size is within their noise
    "grpo_step": "losses",
    "health": "false_alarms",
    "published": "error|exposed",
    "tpu_programs": "collectives|over_floor|^/predicted|^/programs",  # of programs that this engine does not have
    "tpu_train_step": "collectives|between_slices|bubble",
}
"""A part of the names of figures that may be zero or less."""


def numbers(value, name=""):
    """Every number of a JSON value, by its name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{name}/{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers(inner, f"{name}/{place}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def test_every_benchmark_is_run_here_or_elsewhere():
    assert sorted(ARGUMENTS.keys() | ELSEWHERE.keys()) == NAMES and NIGHTLY.keys() < ARGUMENTS.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else pytest.mark.slow) for name in ARGUMENTS],
)
def test_it_runs_to_its_end_and_its_figures_are_measured(name, tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *ARGUMENTS[name].split(), "--json", str(file)]
    environment = {**os.environ, SMALLEST: "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = run.stdout[-3000:] + run.stderr[-3000:]
    assert run.returncode == 0, output
    assert "Traceback (most recent call last)" not in run.stdout + run.stderr, output
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert rows.pop("run")["command"].startswith(f"{SMALLEST}=1 python -m benchmarks.{name}")
    figures = dict(numbers(rows))
    assert len(figures) > 1 and all(map(math.isfinite, figures.values())), figures
    zero = ZERO.get(name, "$^")
    assert not {key: value for key, value in figures.items() if value <= 0 and not re.search(zero, key)}
