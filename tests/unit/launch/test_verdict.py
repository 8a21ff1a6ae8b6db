"""Who failed first, and whether another try can help."""

import pytest

from lockstep.exits import EXIT_CODES, FAULT, PEER_FAILED, TERMINATED, UNREACHABLE, WORKER_LOST
from lockstep.launch.verdict import ASKED, CAUSE_S, Ending, can_retry, first_failure


def cause(*codes, unreachable=False, all_ended=False, waited_s=0.0):
    """The number of the worker that is named; endings are given by code, in the order in which they came about."""
    endings = [Ending(worker=index, code=code, at=100.0 + index) for index, code in enumerate(codes)]
    # They may be heard of in any order.
    found = first_failure(endings[::-1], unreachable=unreachable, all_ended=all_ended, waited_s=waited_s)
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


def test_a_lost_worker_is_the_cause_whatever_the_others_report_of_it():
    assert cause(1, WORKER_LOST) == 1
    assert cause(PEER_FAILED, 1, UNREACHABLE) == 2
    # While one cannot be reached it is not known yet, even where another one has failed.
    assert cause(1, unreachable=True) is None and cause(1, unreachable=False) == 0


@pytest.mark.parametrize("code", sorted(EXIT_CODES))
def test_what_is_tried_again_is_in_the_table(code):
    ending = Ending(worker=0, code=code, at=0.0)
    assert can_retry(ending) == EXIT_CODES[code].retried
    assert can_retry(ending) == (code in (85, 86, WORKER_LOST, UNREACHABLE, 91, FAULT, TERMINATED, 134, 135, 139))


def test_who_stopped_a_job_does_not_want_it_again():
    assert can_retry(Ending(worker=0, code=TERMINATED, at=0.0, reason="the worker is shut down"))
    assert not can_retry(Ending(worker=0, code=TERMINATED, at=0.0, reason=ASKED))
