"""A signal is noted and reaches all hosts; a second one ends the process."""

import os
import signal
import threading

import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.training import StopRequest
from lockstep.training.loop import stopping as stopping_module
from lockstep.training.loop.batch_source import BatchFeed
from lockstep.training.loop.stopping import TrainResult
from lockstep.training.step.train_step import SAVE_FLAG, SIGNAL_FLAG, SLOW_FLAG, StepMetrics
from tests.multiprocess.harness import run_threads
from tests.unit.training.loop.test_trainer import init, make_trainer, rows


@pytest.fixture
def hosts():
    return Hosts(MemoryClient.hub(1)[0])


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(stopping_module.os, "_exit", codes.append)
    return codes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_ends_nothing(hosts, ended, number):
    with StopRequest(hosts) as request:
        assert request.signal is None
        os.kill(os.getpid(), number)
        assert request.signal == hosts.preemption.signal == number
    assert ended == []


def test_one_ctrl_c_that_is_delivered_twice_is_one_request(hosts, ended):
    with StopRequest(hosts):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == []


def test_a_second_request_ends_the_process_at_once(hosts, ended, monkeypatch):
    monkeypatch.setattr(stopping_module, "AGAIN_AFTER_S", 0.0)
    with StopRequest(hosts):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


@pytest.mark.parametrize(
    ("stopped_by", "diverged", "code"), [(None, False, 0), (None, True, 1), (15, False, 143), (2, True, 130)]
)
def test_a_launcher_sees_by_the_exit_code_what_ended_a_run(stopped_by, diverged, code):
    result = TrainResult(
        model=None, completed_steps=3, loss=0.0, stopped_by=stopped_by, tracker_errors=0, diverged=diverged
    )
    assert result.exit_code == code


def test_afterwards_signals_do_what_they_did_and_the_request_is_forgotten(hosts):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(hosts) as request:
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before and request.signal is None


def test_in_another_thread_it_changes_no_handler(hosts):
    before, found = signal.getsignal(signal.SIGINT), []

    def body():
        with StopRequest(hosts):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [before]


def metrics(**values):
    return StepMetrics(**({"loss": 0.0, "stop": 0, "save": False, "slow": False, "values": {}} | values))


def test_after_a_slow_step_all_hosts_hear_of_a_signal_that_came_to_one():
    def body(hosts):
        stop = StopRequest(hosts)
        found = [stop.after_step(metrics(slow=True), 3.0)]
        if hosts.index == 1:
            hosts.preemption.note(signal.SIGTERM)
        return [*found, stop.after_step(metrics(slow=True), 3.0)]

    assert run_threads(body, 2) == [[None, signal.SIGTERM]] * 2


def test_after_a_fast_step_nobody_is_asked():
    """The other host of the two never answers."""
    hosts = Hosts(MemoryClient.hub(2)[0], timeout_s=0.01)
    hosts.preemption.note(signal.SIGTERM)
    assert StopRequest(hosts).after_step(metrics(), 0.1) is None
    assert StopRequest(hosts).after_step(metrics(stop=signal.SIGINT, slow=True), 3.0) == signal.SIGINT


def test_the_leader_says_whether_steps_are_slow_and_a_signal_is_the_largest_flag():
    leader, other = (StopRequest(Hosts(client)) for client in MemoryClient.hub(2))
    assert [leader.flag(SAVE_FLAG), other.flag(0)] == [SAVE_FLAG + SLOW_FLAG, 0], "nothing is measured yet"
    leader.after_step(metrics(), stopping_module.SLOW_STEP_S)
    assert leader.flag(SAVE_FLAG) == SAVE_FLAG
    leader.after_step(metrics(), stopping_module.SLOW_STEP_S + 1)
    assert leader.flag(0) == SLOW_FLAG
    other._preemption.note(signal.SIGINT)
    assert other.flag(0) == SIGNAL_FLAG * signal.SIGINT > SAVE_FLAG + SLOW_FLAG


@pytest.mark.parametrize(("slow_step_s", "steps"), [(0.0, 2), (600.0, 3)])
def test_a_signal_during_a_step_ends_the_run_after_it_where_steps_are_slow(monkeypatch, slow_step_s, steps):
    prepare = BatchFeed.prepare

    def with_a_signal(self, step):
        if step == 2:  # while the devices do the second step
            os.kill(os.getpid(), signal.SIGTERM)
        prepare(self, step)

    monkeypatch.setattr(stopping_module, "SLOW_STEP_S", slow_step_s)
    monkeypatch.setattr(BatchFeed, "prepare", with_a_signal)
    trainer = make_trainer()
    result = trainer.train(init(trainer), rows())
    assert (result.stopped_by, result.completed_steps) == (signal.SIGTERM, steps)
