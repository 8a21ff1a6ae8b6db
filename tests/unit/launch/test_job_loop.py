"""What is tried again, and signals to the launcher; the loop itself runs in test_attempt.py and test_processes.py."""

import signal

import pytest

from lockstep.exits import EXIT_CODES, FAULT, KILLED, TERMINATED, UNREACHABLE, WORKER_LOST
from lockstep.launch.failure import Ending
from lockstep.launch.job_loop import ASKED, can_retry, interrupt, signals_to


@pytest.mark.parametrize("code", sorted(EXIT_CODES))
def test_what_is_tried_again_is_in_the_table(code):
    ending = Ending(worker=0, code=code, at=0.0)
    assert can_retry(ending) == EXIT_CODES[code].retried
    assert can_retry(ending) == (
        code in (85, 86, WORKER_LOST, UNREACHABLE, 91, FAULT, TERMINATED, 134, 135, KILLED, 139)
    )


def test_who_stopped_a_job_does_not_want_it_again():
    assert can_retry(Ending(worker=0, code=TERMINATED, at=0.0, reason="the worker is shut down"))
    assert not can_retry(Ending(worker=0, code=TERMINATED, at=0.0, reason=ASKED))


@pytest.fixture
def hang_up():
    """The action of SIGHUP is that of before again when the test ends."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_is_heard_of_but_under_nohup(hang_up):
    received: list[int] = []
    for action, wanted in ((signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])):
        signal.signal(signal.SIGHUP, action)
        with signals_to(received.append):
            signal.raise_signal(signal.SIGHUP)
        assert (received, signal.getsignal(signal.SIGHUP)) == (wanted, action)
        received.clear()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_interrupts_once_so_that_what_follows_is_done(number):
    before, done = signal.getsignal(number), False
    with pytest.raises(KeyboardInterrupt), signals_to(interrupt):
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            done = True
    assert done and signal.getsignal(number) == before
