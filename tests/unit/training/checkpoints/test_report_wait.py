import contextlib
import logging
import threading

import pytest

from lockstep.training.checkpoints import report_wait
from lockstep.training.checkpoints.report_wait import ReportWait
from tests.clock import PATIENCE_S, until

LONG_S = 3600.0
"""Longer than any wait of these tests lasts."""


class Reports:
    """What a run has reported: done, or hanging until released; counts how often it was asked for."""

    def __init__(self):
        self.done, self.asked = threading.Event(), 0

    def __call__(self):
        self.asked += 1
        return self.done.wait(LONG_S)


@pytest.fixture
def reports():
    made = Reports()
    yield made
    made.done.set()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A wait that is not cut short would be seen."""
    monkeypatch.setattr(report_wait, "REPORT_WAIT_S", LONG_S)


@contextlib.contextmanager
def waiting(wait, step=1):
    """In the block a thread waits, which has asked for the reports; after the block it has ended."""
    thread = threading.Thread(target=wait, args=(step,), daemon=True)
    thread.start()
    until(lambda: wait._asking)
    yield
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_it_ends_with_the_reports(reports, caplog):
    wait = ReportWait(reports)
    with waiting(wait):
        assert wait._end() == wait._begin + LONG_S
        reports.done.set()
    assert not caplog.text


def test_it_is_cut_short_when_training_begins_to_wait(reports, caplog):
    wait = ReportWait(reports)
    with waiting(wait, 7):
        wait.training_waits(True)
        assert wait._end() == wait._training_since + report_wait.TRAINING_WAIT_S
    assert "the checkpoint of step 7 counts without all reports" in caplog.text


def test_where_training_waits_already_it_has_the_same_time(reports):
    wait = ReportWait(reports)
    wait.training_waits(True)
    wait._training_since -= 100  # the arrays were being written
    with waiting(wait):
        assert wait._end() == wait._begin + report_wait.TRAINING_WAIT_S


def test_training_that_waits_no_more_gives_the_time_back(reports):
    wait = ReportWait(reports)
    wait.training_waits(True)
    wait.training_waits(False)
    with waiting(wait):
        assert wait._end() == wait._begin + LONG_S
        reports.done.set()


def test_a_signal_ends_it(reports):
    wait = ReportWait(reports)
    with waiting(wait):
        wait.signalled()
        assert wait._end() == wait._begin + report_wait.PROMPT_S
    wait(2)  # at once


def test_what_is_done_is_seen_after_a_signal_too(reports, caplog):
    wait = ReportWait(reports)
    wait.signalled()
    reports.done.set()
    wait(1)
    assert not caplog.text


def test_reports_that_hang_cost_one_wait_until_they_have_caught_up(reports, monkeypatch, caplog):
    monkeypatch.setattr(report_wait, "REPORT_WAIT_S", 0.1)
    wait = ReportWait(reports)
    wait(1)
    monkeypatch.setattr(report_wait, "REPORT_WAIT_S", LONG_S)
    wait(2)  # at once
    assert reports.asked == 1 and caplog.text.count("counts without all reports") == 1
    reports.done.set()
    until(lambda: not wait._asking)
    reports.done.clear()
    with waiting(wait, 3):
        assert wait._end() == wait._begin + LONG_S, "they had caught up: they are waited for again"
        reports.done.set()
    assert caplog.text.count("counts without all reports") == 1


def test_reports_that_gave_up_are_asked_for_again_without_a_long_wait(caplog):
    """`SampleCallback.flush` returns after ``flush_s`` at the latest, with False."""
    answers = [False, None, True]
    hangs = threading.Event()

    def reported():
        answer = answers.pop(0)
        return hangs.wait(LONG_S) if answer is None else answer

    wait = ReportWait(reported)
    wait(1)
    with waiting(wait, 2):
        assert wait._end() == wait._begin + report_wait.PROMPT_S
    hangs.set()
    until(lambda: not wait._asking)
    wait(3)
    assert caplog.text.count("counts without all reports") == 1 and answers == []


def test_an_error_is_said_and_fails_no_checkpoint(caplog):
    def reported():
        raise OSError("no such queue")

    with caplog.at_level(logging.ERROR):
        ReportWait(reported)(1)
    assert "waiting for reports failed: no such queue" in caplog.text
