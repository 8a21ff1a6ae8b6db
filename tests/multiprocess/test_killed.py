"""A process that is killed or stopped while it trains: the launcher starts the job again, and it goes on."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.multiprocess import test_resume as runs
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launcher import cache_environment
from tests.unit.launch.test_machines import LAUNCHER

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = """
import json, os, signal, sys, time
import lockstep
from lockstep.hosts import start
from tests.multiprocess import test_resume as runs

directory, victim, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def main():
    hosts = start()

    def kill(info):
        if info.next_step == 5 and os.environ.get("LOCKSTEP_RESTARTS", "0") == "0" and hosts.index == victim:
            while 4 not in runs.steps_in(directory):
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    losses, result, _ = runs.train(hosts, directory, at=kill)
    if hosts.is_leader:
        with open(f"{directory}/losses.jsonl", "a") as file:
            file.write(json.dumps([list(losses.items()), result.completed_steps]) + "\\n")

lockstep.run_main(main)
"""


def launched(directory, victim, number=signal.SIGKILL):
    """The end of a job of two processes, and losses and last step of each attempt that came to its end."""
    directory.mkdir()
    words = [sys.executable, str(LAUNCHER), "--backend", "local", "--processes", "2", "--devices_per_process", "2"]
    words += ["--retries", "2", "--", sys.executable, "-c", SCRIPT, str(directory), str(victim), str(int(number))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, env=os.environ | cache_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr, [json.loads(line) for line in (directory / "losses.jsonl").read_text().splitlines()]


def body_plain(hosts):
    losses, result, _ = runs.train(hosts, None)
    return [list(losses.items()), result.completed_steps]


@pytest.fixture(scope="module")
def plain():
    (losses, steps), _ = run_processes(body_plain)
    assert steps == 6
    return dict(losses)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_whichever_process_is_killed_the_job_goes_on_by_itself_bit_for_bit(tmp_path, plain, victim):
    said, [(losses, steps)] = launched(tmp_path / "run", victim)
    assert f"launch: process {victim} failed, exit code 137, killed" in said and "launch: trying again, 1 of 2" in said
    assert steps == 6 and dict(losses) == {step: plain[step] for step in (5, 6)}


@pytest.mark.nightly
def test_the_leader_is_stopped_and_the_job_goes_on_by_itself_bit_for_bit(tmp_path, plain):
    said, [(losses, steps)] = launched(tmp_path / "run", 0, signal.SIGSTOP)
    assert "process 1 of 2 ends because process 0 does not answer" in said and "launch: trying again, 1 of 2" in said
    assert steps == 6 and dict(losses) == {step: plain[step] for step in (5, 6)}
