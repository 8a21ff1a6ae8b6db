"""SIGTERM before the first answer: the job ends on every process with a line that says so, and starts again later."""

import contextlib
import os
import signal
import time

import pytest

from tests.multiprocess.test_sample_kills import LIMIT_S, PROMPTS, children, start, write_config

pytestmark = pytest.mark.multiprocess


def has_open(pid, path):
    with contextlib.suppress(OSError):  # the process, or one of its files, is gone again
        return any(os.path.realpath(each.path) == str(path) for each in os.scandir(f"/proc/{pid}/fd"))
    return False


@pytest.mark.nightly  # in make slow: test_sigterm_at_start.py, and test_resume.py
@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_while_prompts_are_read(victim, checkpoint, tmp_path):
    """The leader reads, the other one waits for it in a call that Python cannot interrupt."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is 12 plus 7, and why is that so?\n" * 1_000_000)  # takes far longer than this test
    config = write_config(tmp_path / "config.yaml", checkpoint, "run", prompts=str(prompts))
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        job = start(config, 2, log, grace_s=600)  # the launcher leaves them time for words of their own
        end = time.monotonic() + LIMIT_S
        while not (workers := children(job.pid)) or not has_open(workers[0], prompts):
            assert job.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.02)
        time.sleep(0.5)  # until the other one waits
        os.kill(workers[victim], signal.SIGTERM)
        code = job.wait(timeout=LIMIT_S)
    text = (tmp_path / "log").read_text()
    assert code == 143, text
    assert f"process {victim} of 2 was asked to end (SIGTERM) in phase 'reading prompts'" in text
    assert f"process {1 - victim} ends because process {victim} was asked to end (SIGTERM)" in text
    assert "Traceback" not in text

    config = write_config(tmp_path / "config.yaml", checkpoint, "run")
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        assert start(config, 1, log).wait(timeout=LIMIT_S) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "run" / "samples" / "samples.jsonl").read_bytes().count(b"\n") == 2 * PROMPTS
