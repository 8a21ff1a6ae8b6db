import contextlib
import dataclasses
import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.placement import make_mesh
from lockstep.training import OptimizerConfig, TokenizedRows, Trainer, TrainerConfig, lm_loss
from lockstep.training.step.train_state import parameter_shardings
from tests import tiny
from tests.unit.training.bigrams import Bigrams

STEPS = 4


def rows(n=32):
    rng = np.random.default_rng(0)
    # TokenizedRows of very different weight: a mean of means would show.
    mask = np.arange(16)[None, :] < rng.integers(2, 16, (n, 1))
    return TokenizedRows(columns={"tokens": rng.integers(0, 16, (n, 16)).astype(np.int32), "loss_mask": mask}, seed=0)


def make_trainer(tracker=None, **values):
    config = TrainerConfig(**({"num_train_steps": STEPS, "train_batch_size": 8} | values))
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0)
    steps = config.num_train_steps
    schedule = optimizer.schedule(steps)
    return Trainer(config, optimizer.build(steps), lm_loss, tracker=tracker, schedule=schedule)


def init(trainer):
    return trainer.init_model(Bigrams.init)


def losses(**values):
    trainer = make_trainer(**values)
    found = []
    trainer.add_hook(lambda info: found.append(info.loss))
    result = trainer.train(init(trainer), rows())
    assert trainer.train_step_traces == 1
    assert result.completed_steps == len(found) == STEPS and result.stopped_by is None
    return found, [np.asarray(leaf) for leaf in jax.tree.leaves(result.model)]


@pytest.fixture(scope="module")
def plain():
    return losses()


def test_no_other_thread_may_launch_between_the_steps(monkeypatch):
    """JAX refuses that in a job of several processes alone, where its order would differ from host to host."""
    asked = []
    monkeypatch.setattr(jax, "thread_guard", lambda on: asked.append(on) or contextlib.nullcontext())
    trainer = make_trainer()
    trainer.train(init(trainer), rows())
    assert asked and all(asked)


def test_training_is_deterministic_to_the_bit(plain):
    again = losses()
    assert again[0] == plain[0]
    for a, b in zip(again[1], plain[1], strict=True):
        np.testing.assert_array_equal(a, b)
    assert losses(seed=1)[0] != plain[0]


def test_accumulation_gives_the_same_losses(plain):
    for rows_at_a_time in (1, 8 // jax.device_count()):
        np.testing.assert_allclose(losses(per_device_parallelism=rows_at_a_time)[0], plain[0], rtol=1e-5)


def test_repeats_of_a_pipeline_reach_the_step():
    trainer = make_trainer(pipeline_repeats=2)
    with pytest.raises(LockstepError, match=r"pipeline_repeats is 2, for \d+ layers in 1 stages"):
        trainer.train(init(trainer), rows())


def test_bfloat16_arithmetic_keeps_float32_parameters(plain):
    found, leaves = losses(mp="p=f32,c=bf16")
    np.testing.assert_allclose(found, plain[0], rtol=2e-2)
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}


def test_the_first_loss_is_the_mean_over_the_tokens_of_the_batch(plain):
    trainer = make_trainer()
    batch = rows().batch(0, 8, slice(0, 8))
    parts = lm_loss(init(trainer), {name: jnp.asarray(column) for name, column in batch.items()})
    assert float(parts.total / parts.weight) == pytest.approx(plain[0][0], rel=1e-5)


@pytest.mark.nightly
def test_with_exact_numerics_a_packed_document_has_the_loss_that_it_has_alone():
    """The loss is that of one token, for sums have an order; the second step is of a gradient that rounds otherwise."""
    document, *others = np.random.default_rng(0).integers(0, 64, (3, 20)).astype(np.int32)
    model, found = dataclasses.replace(tiny.CONFIG, numerics="exact"), []
    for mesh, before, after in (("1,4,1", (), ()), ("2,1,2", others[:1], others[1:])):
        trainer, own = tiny.make_trainer(mesh, 2, mp="p=f32,c=bf16"), []
        trainer.add_hook(lambda info, own=own: own.append(float(info.loss)))
        columns = {"tokens": np.zeros((8, 64), np.int32), "loss_mask": np.zeros((8, 64), bool)}
        columns["segment_ids"] = np.zeros((8, 64), np.int32)
        for number, part in enumerate((*before, document, *after)):
            where = 3, slice(20 * number, 20 * number + 20)
            columns["tokens"][where], columns["segment_ids"][where] = part, number + 1
        columns["loss_mask"][3, 20 * len(before) + 13] = True
        columns = columns if before else {name: columns[name] for name in ("tokens", "loss_mask")}
        trainer.train(tiny.init_model(trainer, config=model), TokenizedRows(columns=columns, seed=0, shuffle=False))
        found.append(own)
    assert found[0][0].hex() == found[1][0].hex()
    assert found[1][1] < found[1][0] and found[0][1] == pytest.approx(found[1][1], rel=0.1)


class OfTwoLengths:
    """Batches whose rows are short in two of four steps; ``padded``: the same targets in rows of one length."""

    def __init__(self, padded):
        self.padded = padded
        if not padded:
            self.lengths = (8, 16)

    def batch(self, step, batch_size, part):
        batch, length = rows().batch(step, batch_size, part), (16, 8, 8, 16)[step]
        if self.padded:
            return {name: column * (np.arange(16) < length).astype(column.dtype) for name, column in batch.items()}
        return {name: column[:, :length] for name, column in batch.items()}


@pytest.mark.parametrize("parallelism", [-1, pytest.param("auto", marks=pytest.mark.slow)])
def test_rows_of_two_lengths_have_a_program_each_and_the_losses_of_padded_ones(parallelism):
    found, traces = [[], []], []
    for padded in (False, True):
        trainer = make_trainer(per_device_parallelism=parallelism)
        trainer.add_hook(lambda info, padded=padded: found[padded].append(info.loss))
        trainer.train(init(trainer), OfTwoLengths(padded))
        traces.append(trainer.train_step_traces)
    assert traces == [2, 1] and len(found[0]) == STEPS
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_a_batch_of_a_length_that_was_not_announced_is_refused():
    batches = OfTwoLengths(padded=False)
    del batches.lengths
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=r"tokens \[8, 8\], but .* for loss_mask \[8, 16\], tokens \[8, 16\], and"):
        trainer.train(init(trainer), batches)


class Recorder:
    def __init__(self):
        self.calls = []

    def on_step(self, info, force=False):
        self.calls.append((info.step, info.next_step, force, math.isnan(info.loss)))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(info.model))


def test_when_hooks_are_called():
    trainer = make_trainer(num_train_steps=5)
    recorder, plain_calls, forced_calls = Recorder(), [], []
    trainer.add_hook(recorder, every=2)
    trainer.add_hook(lambda info: plain_calls.append(info.next_step), every=5)
    trainer.add_hook(lambda info, force=False: forced_calls.append((info.next_step, force)), every=3)
    trainer.train(init(trainer), rows())
    assert recorder.calls == [(-1, 0, False, True), (1, 2, False, False), (3, 4, False, False), (4, 5, True, False)]
    assert plain_calls == [5]  # its turn and the last step are one call
    assert forced_calls == [(3, False), (5, True)]


def test_hooks_that_cannot_be_called():
    with pytest.raises(ConfigError, match="every=0; it must be at least 1"):
        make_trainer().add_hook(print, every=0)
    with pytest.raises(ConfigError, match="on_step"):
        make_trainer().add_hook("x")


class FailingTracker:
    def __init__(self, fail):
        self.fail, self.logged = fail, []

    def log(self, metrics, *, step):
        self.logged.append((step, dict(metrics)))
        self.fail()

    def log_rows(self, name, rows, *, step): ...

    def finish(self): ...


@pytest.mark.parametrize("fail", [lambda: 1 / 0, lambda: jnp.zeros(3) + 1], ids=["error", "launch"])
def test_a_tracker_that_fails_does_not_end_training(fail, plain, caplog):
    tracker = FailingTracker(fail)
    trainer = make_trainer(tracker)
    result = trainer.train(init(trainer), rows())
    assert result.completed_steps == result.tracker_errors == STEPS
    assert caplog.text.count("the tracker failed") == 1
    step, metrics = tracker.logged[0]
    assert step == 1 and metrics["train/loss"] == plain[0][0]
    assert {"train/grad_norm", "train/learning_rate", "throughput/step_duration_s"} <= metrics.keys()
    assert metrics["throughput/tokens_per_s"] > 0 and metrics["throughput/data_wait_s"] >= 0
    assert (metrics["job/processes"], metrics["job/slices"]) == (1, 1)
    assert "job/processes" not in tracker.logged[1][1], "it is the same until the next start"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_after_a_step_without_the_last_hooks(number):
    trainer = make_trainer(num_train_steps=1000)
    recorder = Recorder()
    trainer.add_hook(recorder, every=1000)
    trainer.add_hook(lambda info: os.kill(os.getpid(), number) if info.next_step == 2 else None)
    before = signal.getsignal(number)
    result = trainer.train(init(trainer), rows())
    assert (result.stopped_by, result.completed_steps) == (number, 3)
    assert [call[0] for call in recorder.calls] == [-1]
    assert signal.getsignal(number) is before


def test_parameters_come_into_being_in_their_place():
    trainer = make_trainer()
    model = init(trainer)
    assert model.embed.array.sharding.mesh == make_mesh()
    expected = parameter_shardings(model, trainer.mesh)
    for leaf, sharding in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding == sharding
