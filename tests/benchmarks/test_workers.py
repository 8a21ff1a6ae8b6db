"""A benchmark whose worker dies fails, and one of real clients measures something."""

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.nightly
def test_every_exchange_between_clients_is_measured():
    from benchmarks.job_sizes import between_clients

    figures = between_clients(8)
    assert len(figures) == 14 and all(value > 0 for value in figures.values()), figures
