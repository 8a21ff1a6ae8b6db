"""Batches are read ahead in one thread, and placed while the step before runs."""

import signal
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.exits import work_hangs
from lockstep.hosts import Hosts, MemoryClient, Terminated
from lockstep.placement import make_mesh
from lockstep.training import TrainStep
from lockstep.training.loop import batch_source
from lockstep.training.loop.batch_source import BatchFeed
from lockstep.training.objectives import REFERENCE
from tests.clock import until
from tests.multiprocess.harness import run_threads
from tests.unit.training.loop.test_trainer import STEPS, init, losses, make_trainer, rows


class Noting:
    """Batches whose values are their step; notes who asks for what."""

    def __init__(self):
        self.asked, self.threads, self.may_read = [], set(), threading.Event()
        self.may_read.set()

    def batch(self, step, batch_size, rows):
        assert self.may_read.wait(60)
        self.asked.append(step)
        self.threads.add(threading.current_thread().name)
        return {"tokens": np.full((rows.stop - rows.start, 3), step, np.int32)}


@pytest.fixture
def noting():
    return Noting()


def feed(batches, first=0, last=5, hosts=None):
    return BatchFeed(batches, 8, make_mesh(), first=first, last=last, hosts=hosts or alone())


def alone():
    return Hosts(MemoryClient.hub(1)[0])


def test_the_first_batches_are_read_before_they_are_asked_for(noting):
    source = feed(noting, first=1)
    until(lambda: noting.asked == [1, 2, 3])
    source.close()


def test_every_batch_is_read_once_in_order_by_one_thread(noting):
    source = feed(noting, first=1)
    assert source.structs()["tokens"].shape == (8, 3)
    for step in range(1, 5):
        batch = source.batch(step, None)
        assert np.asarray(batch["tokens"]).tolist() == [[step] * 3] * 8
        source.prepare(step + 1)
    source.close()
    assert noting.asked == [1, 2, 3, 4] and len(noting.threads) == 1
    assert threading.current_thread().name not in noting.threads
    assert not [thread for thread in threading.enumerate() if thread.name in noting.threads]


def test_the_step_is_compiled_for_the_rows_of_every_length(noting):
    source = feed(noting)
    assert source.all_structs() == [source.structs()]
    source.close()
    noting.lengths = (2, 3, 7)
    source = feed(noting)
    assert [each["tokens"].shape for each in source.all_structs()] == [(8, 2), (8, 3), (8, 7)]
    assert source.structs() == source.all_structs()[-1]
    source.close()


def test_a_column_without_positions_is_of_one_shape_beside_rows_of_every_length():
    pairs = {"tokens": np.zeros((8, 2, 5), np.int32), REFERENCE: np.zeros((8, 2), np.float32)}
    source = feed(SimpleNamespace(batch=lambda *_: pairs, lengths=(3, 5)))
    shapes = [{name: each.shape for name, each in structs.items()} for structs in source.all_structs()]
    assert shapes == [{"tokens": (8, 2, length), REFERENCE: (8, 2)} for length in (3, 5)]
    source.close()


def test_what_is_read_is_placed_before_it_is_asked_for(noting):
    source = feed(noting)
    source.batch(0, None)
    until(lambda: len(noting.asked) == 3)
    until(lambda: source._reads[1].done())
    source.prepare(1)
    (tokens,) = source._placed[1].values()
    assert source.batch(1, None)["tokens"] is tokens
    source.close()


def test_preparing_waits_for_no_read(noting):
    source = feed(noting)
    source.batch(0, None)
    until(lambda: len(noting.asked) == 3)
    noting.may_read.clear()
    source.batch(1, None)  # read already; asks for the next
    source.prepare(3)  # returns at once
    assert 3 not in source._placed
    noting.may_read.set()
    assert np.asarray(source.batch(3, None)["tokens"])[0, 0] == 3
    source.close()


class Launching:
    def batch(self, step, batch_size, rows):
        return {"tokens": np.asarray(jnp.zeros((8, 3)) + step)}


def test_reading_may_not_launch():
    source = feed(Launching())
    with pytest.raises(Exception, match="(?i)disallowed|no_execution|execution"):
        source.batch(0, None)
    source.close()


def noted(monkeypatch, name, calls):
    """Have the calls of a method of the train step noted."""
    method = getattr(TrainStep, name)

    def noting(self, *arguments):
        calls.append(name)
        return method(self, *arguments)

    monkeypatch.setattr(TrainStep, name, noting)


class Following:
    """A source that makes each batch of the model before the step, as rollouts are."""

    def __init__(self, trainer):
        self.calls = []
        self.feed = BatchFeed(rows(), 8, trainer.mesh, first=0, last=STEPS, hosts=trainer.hosts)

    def structs(self):
        self.calls.append("structs")
        return self.feed.structs()

    def batch(self, step, model):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model))
        self.calls.append(("batch", step, float(np.asarray(model.norm.array)[0])))
        return self.feed.batch(step, model)

    def prepare(self, step):
        self.calls.append(("prepare", step))

    def close(self):
        self.calls.append("close")
        self.feed.close()


def test_a_source_of_ones_own_sees_the_model_before_each_step_and_works_while_the_step_runs(monkeypatch):
    trainer = make_trainer()
    source, found = Following(trainer), []
    for name in ("__call__", "read"):
        noted(monkeypatch, name, source.calls)
    trainer.add_hook(lambda info: found.append((info.loss, float(np.asarray(info.model.norm.array)[0]))))
    trainer.train(init(trainer), source)
    norms = [1.0, *(norm for _, norm in found)]
    steps = [(("batch", step, norms[step]), "__call__", ("prepare", step + 1), "read") for step in range(STEPS)]
    assert source.calls == ["structs", *(call for calls in steps for call in calls), "close"]
    assert [loss for loss, _ in found] == losses()[0]


def test_a_signal_is_heard_while_rows_are_waited_for(noting, monkeypatch):
    monkeypatch.setattr(batch_source, "CLOSE_S", 0.01)
    hosts = alone()
    source = feed(noting, hosts=hosts)
    assert source.batch(0, None) is not None
    until(lambda: noting.asked == [0, 1, 2])
    noting.may_read.clear()
    for step in (1, 2):
        assert source.batch(step, None) is not None
    threading.Timer(0.1, hosts.preemption.note, [signal.SIGTERM]).start()
    assert source.batch(3, None) is None
    source.close()
    assert work_hangs(), "the thread that reads is left behind"
    noting.may_read.set()
    until(lambda: not work_hangs())


def test_rows_that_come_soon_after_a_signal_are_those_of_the_step_that_carries_it(noting, monkeypatch):
    monkeypatch.setattr(batch_source, "LOOK_S", 0.02)
    noting.may_read.clear()

    def body(hosts):
        hosts.preemption.note(signal.SIGTERM)
        source = feed(noting, hosts=hosts)
        threading.Timer(0.2, noting.may_read.set).start()
        return source.batch(0, None) is not None

    assert run_threads(body, 2) == [True, True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_rows_ends_the_process(noting, number):
    hosts = alone()
    noting.may_read.clear()
    source = feed(noting, hosts=hosts)
    hosts.preemption.note(number)
    with pytest.raises(Terminated if number == signal.SIGTERM else KeyboardInterrupt):
        source.structs()
    noting.may_read.set()
    source.close()


@pytest.mark.parametrize("all_wait", [True, False])
def test_hosts_that_all_wait_for_rows_end_in_order_and_one_that_is_waited_for_leaves(noting, monkeypatch, all_wait):
    monkeypatch.setattr(batch_source, "LOOK_S", 0.02)
    monkeypatch.setattr(batch_source, "ROWS_S", 0.1)
    monkeypatch.setattr(batch_source, "MEET_S", 60.0 if all_wait else 0.2)
    noting.may_read.clear()

    def body(hosts):
        source = feed(noting, hosts=hosts)
        if hosts.index == 1:
            hosts.preemption.note(signal.SIGTERM)
        try:
            if not all_wait and hosts.index == 0:
                return "in the step"
            return source.batch(0, None)
        except Terminated as terminated:
            return terminated.code, terminated.phase

    ended = run_threads(body, 2)
    noting.may_read.set()
    assert ended == ([None] * 2 if all_wait else ["in the step", (143, "waiting for the rows of step 1")])
