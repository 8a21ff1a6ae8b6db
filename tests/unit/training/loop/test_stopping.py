"""A signal is noted, and a second one ends the process."""

import os
import signal
import threading

import pytest

from lockstep.hosts import MemoryClient, Preemption
from lockstep.training import StopRequest
from lockstep.training.loop import stopping as stopping_module


@pytest.fixture
def preemption():
    return Preemption(MemoryClient.hub(1)[0])


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(stopping_module.os, "_exit", codes.append)
    return codes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_ends_nothing(preemption, ended, number):
    with StopRequest(preemption) as request:
        assert request.signal is None
        os.kill(os.getpid(), number)
        assert request.signal == preemption.signal == number
    assert ended == []


def test_one_ctrl_c_that_is_delivered_twice_is_one_request(preemption, ended):
    with StopRequest(preemption):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == []


def test_a_second_request_ends_the_process_at_once(preemption, ended, monkeypatch):
    monkeypatch.setattr(stopping_module, "AGAIN_AFTER_S", 0.0)
    with StopRequest(preemption):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_afterwards_signals_do_what_they_did_and_the_request_is_forgotten(preemption):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(preemption) as request:
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before and request.signal is None


def test_in_another_thread_it_changes_no_handler(preemption):
    before, found = signal.getsignal(signal.SIGINT), []

    def body():
        with StopRequest(preemption):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [before]
