import logging
import threading
import time

import pytest

from lockstep.training import report_wait
from lockstep.training.report_wait import ReportWait

LONG_S = 20.0
"""Longer than any wait of these tests may last."""


class Reports:
    """What a run has reported: done, or hanging until released; counts how often it was asked for."""

    def __init__(self):
        self.done, self.asked = threading.Event(), 0

    def __call__(self):
        self.asked += 1
        return self.done.wait(60)


@pytest.fixture
def reports():
    made = Reports()
    yield made
    made.done.set()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A wait that is not cut short would be seen."""
    monkeypatch.setattr(report_wait, "REPORT_WAIT_S", LONG_S)


def seconds(function, *arguments):
    begin = time.monotonic()
    function(*arguments)
    return time.monotonic() - begin


def test_it_ends_with_the_reports(reports, caplog):
    threading.Timer(0.2, reports.done.set).start()
    assert 0.1 < seconds(ReportWait(reports), 1) < LONG_S / 2
    assert not caplog.text


def test_it_is_cut_short_when_training_begins_to_wait(reports, caplog):
    wait = ReportWait(reports)
    threading.Timer(0.2, wait.training_waits, [True]).start()
    assert 0.2 + report_wait.TRAINING_WAIT_S <= seconds(wait, 7) + 0.05 < LONG_S / 2
    assert "the checkpoint of step 7 counts without all reports" in caplog.text


def test_where_training_waits_already_it_has_the_same_time(reports, monkeypatch):
    monkeypatch.setattr(report_wait, "TRAINING_WAIT_S", 0.3)
    wait = ReportWait(reports)
    wait.training_waits(True)
    time.sleep(0.4)  # the arrays were being written
    assert 0.25 < seconds(wait, 1) < LONG_S / 2


def test_training_that_waits_no_more_gives_the_time_back(reports):
    wait = ReportWait(reports)
    wait.training_waits(True)
    wait.training_waits(False)
    threading.Timer(report_wait.TRAINING_WAIT_S + 0.3, reports.done.set).start()
    assert seconds(wait, 1) > report_wait.TRAINING_WAIT_S + 0.2


def test_a_signal_ends_it(reports):
    wait = ReportWait(reports)
    threading.Timer(0.2, wait.signalled).start()
    assert seconds(wait, 1) < LONG_S / 2
    assert seconds(wait, 2) < LONG_S / 2


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
    assert seconds(wait, 2) < LONG_S / 2 and reports.asked == 1
    assert caplog.text.count("counts without all reports") == 1
    reports.done.set()
    while wait._asking:
        time.sleep(0.01)
    reports.done.clear()
    threading.Timer(0.3, reports.done.set).start()
    assert seconds(wait, 3) > 0.2, "they had caught up: they are waited for again"
    assert caplog.text.count("counts without all reports") == 1


def test_reports_that_gave_up_are_asked_for_again_without_a_long_wait(monkeypatch, caplog):
    """`SampleCallback.flush` returns after ``flush_s`` at the latest, with False."""
    answers = [False, None, True]
    hangs = threading.Event()

    def reported():
        answer = answers.pop(0)
        return hangs.wait(60) if answer is None else answer

    wait = ReportWait(reported)
    wait(1)
    assert seconds(wait, 2) < LONG_S / 2
    hangs.set()
    while wait._asking:
        time.sleep(0.01)
    wait(3)
    assert caplog.text.count("counts without all reports") == 1 and answers == []


def test_an_error_is_said_and_fails_no_checkpoint(caplog):
    def reported():
        raise OSError("no such queue")

    with caplog.at_level(logging.ERROR):
        ReportWait(reported)(1)
    assert "waiting for reports failed: no such queue" in caplog.text
