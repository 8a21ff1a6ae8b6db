"""A benchmark whose worker dies fails, and one of real clients measures something."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import job_sizes
from benchmarks.workers import run_on_threads, run_workers

ROOT = Path(__file__).parents[2]
DYING = """
import threading
from benchmarks.workers import run_on_threads

def work(task):
    if task == 1:
        raise ValueError("task 1 is dead")
    threading.Event().wait()

run_on_threads(work, range(3))
"""


def test_a_thread_that_dies_ends_the_benchmark_whoever_waits_for_it():
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1 and "ValueError: task 1 is dead" in done.stderr


def test_what_threads_give_is_in_the_order_of_the_tasks():
    assert run_on_threads(lambda number: (time.sleep(0.01 * number), -number)[1], [3, 1, 2]) == [-3, -1, -2]


KILLED = """
import os, signal
from benchmarks.workers import report

report({"process": int(os.environ["LOCKSTEP_PROCESS_ID"])})
if os.environ["LOCKSTEP_PROCESS_ID"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_fails_the_benchmark_though_all_have_reported(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    with pytest.raises(RuntimeError, match="-m killed ended with 137"):
        run_workers("killed", processes=2, devices=1, environment={"PYTHONPATH": str(tmp_path)})


def test_processes_that_report_nothing_are_an_error():
    with pytest.raises(RuntimeError, match="platform: no process reported a figure"):
        run_workers("platform", processes=2, devices=1)


def test_no_benchmark_starts_workers_of_its_own():
    starts = re.compile(r"\b(subprocess|multiprocessing|threading\.Thread|ThreadPoolExecutor)\b")
    files = [path for path in (ROOT / "benchmarks").rglob("*.py") if starts.search(path.read_text(encoding="utf-8"))]
    assert {str(path.relative_to(ROOT / "benchmarks")) for path in files} == {
        "workers.py",
        "grpo/turns.py",  # contestants that take turns: a dead one is a ContestantError, see test_grpo_step.py
        "accelerator.py",  # sections of which each may fail, and then is an error in the figures
        "run_facts.py",  # git
    }


@pytest.mark.parametrize("counts", [[], ["0"], ["8", "-1"]])
def test_numbers_of_hosts_that_cannot_be_are_refused(counts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["job_sizes", "--json=out.json", "--", *counts])
    with pytest.raises(SystemExit, match="2"):
        job_sizes.main()
    assert "Give some, each at least 1, such as 8 64." in capsys.readouterr().err


@pytest.mark.slow
def test_any_number_of_hosts_has_a_first_batch_and_launches():
    script = "import json; from benchmarks.job_sizes import on_each_host; print(json.dumps([*map(on_each_host, %s)]))"
    counts = [1, 2, 6]
    run = subprocess.run([sys.executable, "-c", script % counts], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    for figures in json.loads(run.stdout):
        assert len(figures) == 4 and all(value > 0 for value in figures.values()), figures
