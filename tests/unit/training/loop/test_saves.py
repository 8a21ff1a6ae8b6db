"""Runs that are interrupted go on as if they had not been: on the same mesh bit for bit."""

import itertools
import json
import logging
import os
import re
import signal
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError, DivergenceError, HostError, PeerError
from lockstep.placement import make_mesh
from lockstep.training import CheckpointerConfig, OptimizerConfig, Trainer, TrainerConfig, lm_loss
from lockstep.training.checkpoints import checkpointer as checkpointer_module
from lockstep.training.checkpoints.config import KeepConfig
from lockstep.training.loop import saves as saves_module
from lockstep.training.loop.saves import Saves
from lockstep.training.step.train_step import SAVE_FLAG
from tests.clock import until
from tests.unit.training.bigrams import Bigrams
from tests.unit.training.loop.test_trainer import rows

STEPS = 7


def make(path, *, mesh=None, tracker=None, every=2, keep=2, settings=None, **values):
    checkpointer = CheckpointerConfig(every=every, keep=KeepConfig(newest=keep), **(settings or {}))
    config = TrainerConfig(
        **({"num_train_steps": STEPS, "train_batch_size": 8, "checkpointer": checkpointer} | values),
        log_dir=str(path),
        run_id="run",
    )
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0).build(STEPS)
    return Trainer(config, optimizer, lm_loss, mesh=mesh, tracker=tracker)


class Noting:
    """A hook with a state: every call with its step."""

    name = "noting"

    def __init__(self):
        self.calls = []
        self.interrupted = False

    def on_step(self, info, force=False):
        self.calls.append([info.next_step, force])

    def state(self):
        return {"calls": list(self.calls)}

    def load_state(self, state):
        self.calls = list(state["calls"])


def run(trainer, at=None):
    """Losses by completed steps, the hook and the result; ``at``: a function that is called after steps."""
    noting, losses = Noting(), {}
    trainer.add_hook(noting, every=3)
    trainer.add_hook(lambda info: losses.update({info.next_step: info.loss}))
    if at is not None:
        trainer.add_hook(at)
    state = trainer.restore(Bigrams.init)
    result = trainer.train(trainer.init_model(Bigrams.init) if state is None else state, rows())
    assert trainer.train_step_traces == 1
    return losses, noting, result


def terminate(step, number=signal.SIGTERM):
    return lambda info: os.kill(os.getpid(), number) if info.next_step == step else None


class Crash(Exception): ...


def crash(step):
    def at(info):
        if info.next_step == step:
            raise Crash

    return at


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    losses, noting, result = run(make(tmp_path_factory.mktemp("plain")))
    return losses, noting.calls, [np.asarray(leaf) for leaf in jax.tree.leaves(result.model)]


def assert_same_end(plain, losses, noting, result):
    expected, calls, leaves = plain
    assert losses == {step: loss for step, loss in expected.items() if step in losses} and max(losses) == STEPS
    assert noting.calls == calls
    for mine, theirs in zip(jax.tree.leaves(result.model), leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), theirs)


def test_a_run_that_crashed_goes_on_from_its_newest_checkpoint_bit_for_bit(tmp_path, plain):
    with pytest.raises(Crash):
        run(make(tmp_path), at=crash(5))
    losses, noting, result = run(make(tmp_path))
    assert sorted(losses) == [5, 6, 7]
    assert_same_end(plain, losses, noting, result)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow)])
def test_sigterm_saves_after_the_step_and_hooks_not_called_then_are_called_at_the_resume(tmp_path, plain, step):
    _, noting, result = run(make(tmp_path), at=terminate(step))
    assert (result.stopped_by, result.completed_steps) == (signal.SIGTERM, step + 1)
    assert result.checkpoint.endswith(f"step-{step + 1}")
    losses, noting, result = run(make(tmp_path, resume="must"))
    assert min(losses) == step + 1, "the function hooks of the step that was not ended"
    assert_same_end(plain, losses, noting, result)


def test_the_leaders_clock_decides_when_it_is_time_to_save(tmp_path, plain, monkeypatch):
    """Time is up at every second step of the leader, and never on other hosts."""
    clock = itertools.count()
    monkeypatch.setattr(saves_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    trainer = make(tmp_path, every=None, settings={"every_minutes": 2 / 60}, keep=9)
    losses, noting, result = run(trainer)
    assert_same_end(plain, losses, noting, result)
    steps = trainer._checkpointer.directory.steps()
    assert steps[-1] == STEPS and 2 < len(steps) < STEPS


def test_who_does_not_lead_never_asks_for_a_save():
    config = TrainerConfig()
    checkpointer = SimpleNamespace(config=CheckpointerConfig(every_minutes=1e-9))
    leads = [SimpleNamespace(is_leader=leader) for leader in (True, False)]
    assert [Saves(checkpointer, None, None, config, hosts).flag() for hosts in leads] == [SAVE_FLAG, 0]


@pytest.mark.parametrize(
    ("error", "processes", "waits"),
    [
        (DivergenceError("nan"), 2, 1),
        (PeerError("", 2), 2, 1),
        (PeerError("", 1), 2, 0),
        (HostError(), 2, 0),
        (Crash(), 2, 0),
        (Crash(), 1, 1),
    ],
)
def test_a_save_under_way_is_completed_after_an_error_that_every_process_has(error, processes, waits):
    waited = []
    checkpointer = SimpleNamespace(pending=SimpleNamespace(step=2), wait=lambda: waited.append(2))
    hosts = SimpleNamespace(count=processes, is_leader=True)
    with pytest.raises(type(error)), Saves(checkpointer, None, None, TrainerConfig(), hosts).completed():
        raise error
    assert len(waited) == waits


@pytest.mark.parametrize("fits", [True, False])
def test_a_save_on_sigterm_says_whether_it_was_in_time(tmp_path, monkeypatch, caplog, fits):
    write = checkpointer_module.write_arrays

    def slow(directory, arrays):
        wait = write(directory, arrays)
        return lambda: (fits or until(lambda: late in caplog.text), wait())

    late = (
        "the checkpoint of step 3 is not complete 0.3 s after SIGTERM (checkpointer.grace_s): if the machine is taken"
    )
    monkeypatch.setattr(checkpointer_module, "write_arrays", slow)
    with caplog.at_level(logging.INFO, logger=checkpointer_module.__name__):
        result = run(make(tmp_path, every=100, settings={"grace_s": 0.3 if not fits else 600.0}), at=terminate(2))[2]
    assert result.checkpoint.endswith("step-3"), "it is saved all the same where the machine is still there"
    assert (late in caplog.text) != fits
    assert "s after SIGTERM, which leaves" in caplog.text


def test_a_save_that_will_not_fit_is_announced(tmp_path, monkeypatch, caplog):
    write = checkpointer_module.write_arrays

    def slow(directory, arrays):
        wait = write(directory, arrays)
        return lambda: (time.sleep(0.2), wait())

    monkeypatch.setattr(checkpointer_module, "write_arrays", slow)
    run(make(tmp_path, every=2, settings={"grace_s": 0.1}), at=terminate(4))
    assert re.search("this one may not be complete in time, and the run then goes on from step [24]", caplog.text)


@pytest.mark.parametrize("fits", [True, False])
def test_a_save_under_way_at_sigterm_counts_where_no_other_fits(tmp_path, plain, monkeypatch, caplog, fits):
    write = checkpointer_module.write_arrays

    def slow(directory, arrays):
        wait = write(directory, arrays)
        return lambda: (time.sleep(0.2), wait())

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer_module, "write_arrays", slow)
        result = run(make(tmp_path, settings={"grace_s": 600.0 if fits else 0.2}), at=terminate(4))[2]
    assert (result.completed_steps, result.checkpoint.rpartition("/")[2]) == (5, "step-5" if fits else "step-4")
    said = "step 4, which was being written at SIGTERM, is the last" in caplog.text
    assert said != fits and ("done again by the next start: 1 step(s) after it" in caplog.text) != fits
    losses, noting, result = run(make(tmp_path, resume="must"))
    assert min(losses) == 5
    assert_same_end(plain, losses, noting, result)


def test_ctrl_c_does_not_save(tmp_path):
    assert run(make(tmp_path), at=terminate(1, signal.SIGINT))[2].checkpoint is None


def test_no_save_on_preemption(tmp_path):
    assert run(make(tmp_path, settings={"save_on_preemption": False}), at=terminate(1))[2].checkpoint is None


def test_a_hook_that_was_interrupted_is_called_again_at_the_same_step(tmp_path, plain):
    """As the callback's round at step 3, which ends without samples because the job is asked to end."""
    trainer = make(tmp_path)
    interrupting = Noting()
    original = interrupting.on_step

    def on_step(info, force=False):
        interrupting.interrupted = info.next_step == 3
        if interrupting.interrupted:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            original(info, force)

    interrupting.on_step = on_step
    trainer.add_hook(interrupting, every=3)
    result = trainer.train(trainer.init_model(Bigrams.init), rows())
    assert (result.completed_steps, result.checkpoint.rpartition("/")[2]) == (4, "step-3")
    losses, noting, result = run(make(tmp_path))
    assert sorted(losses) == [3, 4, 5, 6, 7]
    assert_same_end(plain, losses, noting, result)


class Interrupted(Noting):
    """A hook that is asked to end in one of its calls, given by step and ``force``; the signal comes then."""

    def __init__(self, call, number=signal.SIGTERM):
        super().__init__()
        self.call, self.number = call, number

    def on_step(self, info, force=False):
        self.interrupted = [info.next_step, force] == self.call
        if self.interrupted:
            os.kill(os.getpid(), self.number)
        else:
            super().on_step(info, force)


def with_hook(path, hook, **values):
    trainer = make(path, num_train_steps=4, every=100, **values)
    trainer.add_hook(hook, every=2)
    state = trainer.restore(Bigrams.init)
    result = trainer.train(trainer.init_model(Bigrams.init) if state is None else state, rows())
    found = trainer._checkpointer.directory
    return (
        result.completed_steps,
        result.stopped_by,
        {step: found.metadata(step).hooks_called for step in found.steps()},
    )


@pytest.mark.parametrize(
    ("call", "steps", "saved"),
    [
        pytest.param([0, False], 0, {}, marks=pytest.mark.slow),
        ([4, True], 4, {4: False}),
        pytest.param([2, False], 3, {2: False}, marks=pytest.mark.slow),
        pytest.param([4, False], 4, {4: False}, marks=pytest.mark.slow),
    ],
)
def test_a_hook_that_was_interrupted_is_called_when_the_run_goes_on_wherever_that_was(tmp_path, call, steps, saved):
    """Before the first step, in the middle, after the last step, at the end; once more at the resume."""
    assert with_hook(tmp_path, Interrupted(call)) == (steps, signal.SIGTERM, saved)
    for step in saved:
        ends = (step, signal.SIGTERM, saved)
        assert with_hook(tmp_path, Interrupted([step, False])) == ends, "no step was trained, nothing was replaced"
    noting = Noting()
    assert with_hook(tmp_path, noting) == (4, None, {**dict.fromkeys(saved, False), 4: True})
    made = list(dict.fromkeys(map(tuple, noting.calls)))  # those before the checkpoint as its state has them
    assert made == [(0, False), (2, False), (4, False), (4, True)]
    calls = list(noting.calls)
    assert with_hook(tmp_path, noting, resume="must")[:2] == (4, None)
    assert noting.calls == calls, "a later start has nothing left to do"


def test_a_checkpoint_in_which_the_last_hooks_cannot_be_noted_is_a_save_that_failed(tmp_path, monkeypatch):
    def commit(self, metadata):
        raise OSError("the disk is full")

    with_hook(tmp_path, Interrupted([4, True]))
    monkeypatch.setattr(checkpointer_module.CheckpointDirectory, "commit", commit)
    trainer = make(tmp_path, num_train_steps=4)
    result = trainer.train(trainer.restore(Bigrams.init), rows())
    assert (result.checkpoint_errors, result.stopped_by) == (1, None)
    assert not trainer._checkpointer.directory.metadata(4).hooks_called


def test_ctrl_c_in_the_last_hooks_keeps_what_was_trained(tmp_path):
    assert with_hook(tmp_path, Interrupted([4, True], signal.SIGINT)) == (4, signal.SIGINT, {4: False})


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_on_another_mesh_it_goes_on_to_rounding(tmp_path, plain, devices):
    with pytest.raises(Crash):
        run(make(tmp_path), at=crash(5))
    losses, _, _ = run(make(tmp_path, mesh=make_mesh("auto", jax.devices()[:devices])))
    assert sorted(losses) == [5, 6, 7]
    np.testing.assert_allclose(list(losses.values()), [plain[0][step] for step in losses], rtol=1e-5)


def test_a_run_that_is_complete_does_nothing(tmp_path, plain):
    run(make(tmp_path))
    trainer, noting = make(tmp_path), Noting()
    trainer.add_hook(noting)
    result = trainer.train(trainer.restore(Bigrams.init), rows())
    assert result.completed_steps == STEPS and result.loss == plain[0][STEPS]
    assert noting.calls == plain[1]


def test_the_last_step_counts_once_the_last_hooks_are_done(tmp_path):
    class CrashesAtTheEnd(Noting):
        def on_step(self, info, force=False):
            if force:
                raise Crash

    trainer = make(tmp_path, every=1, num_train_steps=3)
    trainer.add_hook(CrashesAtTheEnd())
    with pytest.raises(Crash):
        run(trainer)
    losses, noting, _ = run(make(tmp_path, every=1, num_train_steps=3))
    assert sorted(losses) == [3] and noting.calls == [[0, False], [3, False], [3, True]]


def test_a_save_that_fails_is_counted_and_changes_nothing(tmp_path, plain, monkeypatch):
    """The place of the arrays is a file: orbax's own writing fails, in its threads."""
    begin = checkpointer_module.CheckpointDirectory.begin

    def with_a_file_in_the_way(self, step):
        name = begin(self, step)
        if step == 2:
            (self.of(step) / name / "ocdbt.process_0").write_text("in the way")
        return name

    monkeypatch.setattr(checkpointer_module.CheckpointDirectory, "begin", with_a_file_in_the_way)
    losses, noting, result = run(make(tmp_path, keep=9))
    assert result.checkpoint_errors == 1
    assert_same_end(plain, losses, noting, result)
    assert make(tmp_path)._checkpointer.directory.steps() == [4, 6, 7]


def test_another_optimizer_or_seed_is_refused_by_name(tmp_path):
    run(make(tmp_path, num_train_steps=1))
    with pytest.raises(PeerError, match=r"seed: 0 → 1 \(now\)"):
        make(tmp_path, seed=1).restore(Bigrams.init)
    with pytest.raises(PeerError, match=r"train_batch_size: 8 → 16 \(now\)"):
        make(tmp_path, train_batch_size=16).restore(Bigrams.init)
    with pytest.raises(PeerError, match=r"array model\.embed\.0: float32\[16,16\] → bfloat16\[16,16\] \(now\)"):
        make(tmp_path, mp="p=bf16").restore(Bigrams.init)


def test_a_state_of_another_trainer_is_refused(tmp_path):
    run(make(tmp_path, num_train_steps=1))
    state = make(tmp_path).restore(Bigrams.init)
    with pytest.raises(ConfigError, match="a state that this trainer has not restored"):
        make(tmp_path).train(state, rows())


def test_a_changed_configuration_is_said(tmp_path, caplog):
    config = {"optimizer": {"learning_rate": 1e-2}}
    first = make(tmp_path, num_train_steps=1)
    first._checkpointer._run_config = config
    run(first)
    second = make(tmp_path)
    second._checkpointer._run_config = {"optimizer": {"learning_rate": 1e-3}}
    second.restore(Bigrams.init)
    assert "another configuration than at step 1: optimizer.learning_rate: 0.01 → 0.001" in caplog.text


def test_checkpoints_need_a_place_that_can_be_found_again():
    config = TrainerConfig(checkpointer=CheckpointerConfig())
    with pytest.raises(ConfigError, match=r"neither run_dir nor trainer\.run_id"):
        Trainer(config, OptimizerConfig().build(1), lm_loss)


def test_a_checkpoint_says_what_it_has(tmp_path):
    run(make(tmp_path, num_train_steps=1))
    found = json.loads((tmp_path / "run" / "checkpoints" / "step-1" / "metadata.json").read_text())
    assert found["step"] == 1 and found["shapes"]["model.norm.0"] == "float32[16]"
    assert found["facts"] == {"seed": "0", "train_batch_size": "8"} and found["hooks_called"] is True
