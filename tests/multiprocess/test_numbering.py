"""Jobs whose processes have other numbers on the devices than at the coordination service, as on a TPU.

Between threads tests/unit/hosts/test_start.py shows the same.
"""

import json

import pytest

from tests.multiprocess import permuted
from tests.multiprocess.harness import POOL, run_unattended
from tests.multiprocess.host_bodies import BEHAVIOURS

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROCESSES = "2,0,3,1"
WAIT_S = 0.5
SCENARIO = ["python", "-m", "tests.multiprocess.permuted", "1,0", "tests.multiprocess.scenarios"]


@pytest.fixture(scope="module")
def group():
    group = POOL.start(4, 1, {permuted.VARIABLE: PROCESSES})
    yield group
    group.end()


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_between_processes(group, behaviour):
    body, check = BEHAVIOURS[behaviour]
    check(group.run(body, (WAIT_S,), timeout_s=60.0), WAIT_S)


def test_the_end_of_the_process_that_runs_the_service_is_told_by_its_own_number():
    """Task 0, which is process 1 here, dies without a word; the leader is another process."""
    service, leader = run_unattended([*SCENARIO, "die", "1"])
    assert service.code == -9
    assert leader.code == 85, leader.log
    # Whoever of the two that watch sees it first says it.
    said = (
        "process 1 has died, and with it the coordination service",
        "process 1, which runs the coordination service",
    )
    assert any(text in leader.log for text in said), leader.log


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_process_that_fails_is_told_by_its_own_number(victim):
    ends = run_unattended([*SCENARIO, "fail", str(victim)])[::-1]  # in the order of the processes
    other = 1 - victim
    assert [ends[victim].code, ends[other].code] == [1, 85], json.dumps([end.log for end in ends])
    assert f"process {other} ends because process {victim} failed: ValueError: boom" in ends[other].log
    assert "Terminating process" not in ends[other].log
    assert f"process {victim} of 2 (task {other} of the coordination service) on " in ends[victim].log
