"""When the job is joined: before a callback is made, after it, or never."""

import pytest

from tests.multiprocess.harness import run_command

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]  # in one process: tests/unit/hosts/test_start.py

LOOP = ["python", "-m", "tests.multiprocess.joining_loop"]


@pytest.mark.parametrize("how", ["initialize", pytest.param("start", marks=pytest.mark.nightly)])
def test_a_callback_that_is_made_before_the_job_is_joined_writes_each_row_once(how, tmp_path):
    run = run_command([*LOOP, how, str(tmp_path)], devices=1)
    assert run.code == 0, run.output
    counts = [f'COUNTS {{"process": {process}, "of": 2, "rounds": 2}}' for process in (0, 1)]
    assert all(any(line.endswith(count) for line in run.output.splitlines()) for count in counts), run.output
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_processes_that_never_join_a_job_are_refused_before_a_row_is_written(tmp_path):
    run = run_command([*LOOP, "never", str(tmp_path)], devices=1)
    assert run.code == 1, run.output
    text = "2 processes were started (the variable LOCKSTEP_NUM_PROCESSES), but the job of this one has 1"
    assert text in run.output and "Call lockstep.start(), with Levanter lockstep.levanter.start(" in run.output
    assert not list(tmp_path.rglob("samples.jsonl"))
