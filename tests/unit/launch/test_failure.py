"""Who failed first, of processes, workers and pods."""

import pytest

from lockstep.exits import FAULT, PEER_FAILED, UNREACHABLE, WORKER_LOST
from lockstep.launch.failure import (
    CAUSE_S,
    QUIET_S,
    Ending,
    failed_by_their_logs,
    failed_by_themselves,
    first_failure,
    tail_to_show,
)
from lockstep.launch.record import kept_logs


def cause(*codes, unreachable=False, all_ended=False, waited_s=0.0, themselves=None):
    """The number of the worker that is named; endings are given by code, in the order in which they came about."""
    endings = [Ending(worker=index, code=code, at=100.0 + index) for index, code in enumerate(codes)]
    # They may be heard of in any order.
    known = {"unreachable": unreachable, "all_ended": all_ended, "waited_s": waited_s, "themselves": themselves}
    found = first_failure(endings[::-1], **known)
    return None if found is None else found.worker


def test_the_first_in_time_is_named_and_one_with_an_error_of_its_own_before_those_that_ended_in_consequence():
    assert cause(0, 3, 1) == 1
    assert cause(PEER_FAILED, 1) == 1
    assert cause(134, PEER_FAILED, 1) == 2
    assert cause(0, 0, all_ended=True) is None


def test_without_an_error_of_its_own_there_is_a_wait_for_one():
    assert cause(PEER_FAILED, PEER_FAILED) is None
    assert cause(PEER_FAILED, PEER_FAILED, waited_s=CAUSE_S + 0.1) == 0
    assert cause(0, PEER_FAILED, 137, all_ended=True) == 1


def test_a_fault_may_come_of_the_error_of_another_and_comes_before_what_comes_of_it():
    assert cause(FAULT, 1) == 1 and cause(FAULT, PEER_FAILED) is None
    assert cause(PEER_FAILED, FAULT, 137, all_ended=True) == 1


def test_who_has_said_that_it_failed_is_named_before_one_that_was_told():
    assert cause(1, 1, themselves={1}) == cause(0, 1, themselves={1}) == 1
    assert cause(1, 0, themselves={1}) is None and cause(1, 0, themselves={1}, waited_s=CAUSE_S + 0.1) == 0
    assert cause(3, 0, themselves=()) is None and cause(3, 0, themselves=(), waited_s=QUIET_S + 0.1) == 0
    assert cause(PEER_FAILED, 1, themselves=(), all_ended=True) == 1


def test_a_lost_worker_is_the_cause_whatever_the_others_report_of_it():
    assert cause(1, WORKER_LOST) == 1
    assert cause(PEER_FAILED, 1, UNREACHABLE) == 2
    # While one cannot be reached it is not known yet, even where another one has failed.
    assert cause(1, unreachable=True) is None and cause(1, unreachable=False) == 0


STACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
OWN = STACK + "KeyError: 'question'"
GLOO = STACK + "ValueError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:25319"
BOTH = (
    GLOO
    + "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    + STACK
    + "RuntimeError: step 3"
)
TOLD = "error: 1 of 3 processes failed at 'reading prompts'. process 2: PromptError: no field 'prompt'"
MINE = "error: data.train_urls is empty"


@pytest.mark.parametrize(
    ("outputs", "named", "themselves", "shown"),
    [
        (("step 1", OWN), 1, {1}, (1, OWN)),
        ((GLOO, OWN), 1, {1}, (1, OWN)),
        ((GLOO, OWN), 0, {1}, (1, OWN)),  # 1 waits in JAX's own exit barrier, and has no code yet
        ((BOTH, OWN.partition("\n")[2]), 1, {1}, (1, OWN.partition("\n")[2])),  # its last lines begin inside the stack
        ((GLOO, "killed"), 1, set(), (1, "killed")),
        ((MINE, GLOO), 0, {0}, (0, "")),  # it stands a few lines above
        ((TOLD, "step 1", "step 1"), 2, {2}, (2, "")),  # the leader has said it for all
        ((TOLD, "step 1", OWN), 2, {2}, (2, OWN)),
    ],
)
def test_the_process_with_an_error_of_its_own_is_told_from_one_that_ended_because_of_it(
    outputs, named, themselves, shown
):
    last = [text.encode().splitlines() for text in outputs]
    assert failed_by_themselves(last) == themselves
    assert tail_to_show(named, last) == (shown[0], shown[1].encode().splitlines())


def test_logs_are_read_from_their_ends(tmp_path):
    for index, text in {0: GLOO, 2: "step 1\n" * 20_000 + OWN, 3: OWN + "\nstep 1" * 50}.items():
        (tmp_path / "attempt-1").mkdir(exist_ok=True)
        (tmp_path / "attempt-1" / f"worker-{index}.log").write_text(text)
    assert failed_by_their_logs(kept_logs(tmp_path, 1)) == {2}
    assert failed_by_their_logs([]) == set()
