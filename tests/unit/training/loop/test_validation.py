"""Validation: exact over all rows of each source, by one program, and the same in a run that goes on."""

import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError, HostError, PeerError
from lockstep.placement import make_mesh
from lockstep.training import (
    CheckpointerConfig,
    OptimizerConfig,
    StepInfo,
    TokenizedRows,
    Trainer,
    TrainerConfig,
    lm_loss,
)
from lockstep.training.loop.validation import Validation
from lockstep.training.objectives import SimpoConfig
from tests import tiny
from tests.multiprocess.harness import run_threads
from tests.rollouts import Recorder
from tests.unit.training.bigrams import Bigrams
from tests.unit.training.loop.test_trainer import rows

STEPS = 5


def pairs(n):
    rng = np.random.default_rng(1)
    mask = np.arange(8)[None, None, :] < rng.integers(2, 8, (n, 2, 1))
    return TokenizedRows(columns={"tokens": rng.integers(0, 16, (n, 2, 8)).astype(np.int32), "loss_mask": mask}, seed=0)


def run(sources, every=2, loss=lm_loss, train_rows=None, at=None, perplexity=True, **values):
    """What the tracker got by step, the validation and the trainer."""
    tracker = Recorder()
    config = TrainerConfig(**({"num_train_steps": STEPS, "train_batch_size": 8} | values))
    trainer = Trainer(config, OptimizerConfig(learning_rate=1e-2, warmup=0).build(STEPS), loss, tracker=tracker)
    validation = Validation(trainer, loss, sources, perplexity=perplexity)
    models = {}
    trainer.add_hook(validation, every)
    trainer.add_hook(
        lambda info: models.update({info.next_step: jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)), info.model)})
    )
    if at is not None:
        trainer.add_hook(at)
    state = trainer.restore(Bigrams.init)
    trainer.train(trainer.init_model(Bigrams.init) if state is None else state, train_rows or rows())
    assert trainer.train_step_traces == 1
    evaluated = {
        step: {name: value for name, value in metrics.items() if name.startswith("eval/")}
        for step, metrics in tracker.scalars.items()
        if "eval/loss" in metrics
    }
    return evaluated, validation, trainer, models


@pytest.mark.parametrize("parallelism", [*(pytest.param(each, marks=pytest.mark.slow) for each in (-1, 1)), 3])
def test_figures_are_exact_over_all_rows_of_each_source(parallelism):
    """13 and 5 rows, which no batch divides, of very different weight."""
    sources = {"easy": rows(13), "hard": TokenizedRows(columns=rows(32).take(range(5, 10)), seed=0)}
    found, validation, trainer, models = run(sources, per_device_eval_parallelism=parallelism)
    assert sorted(found) == [2, 4, 5]  # and after the last step
    for step, figures in found.items():
        sums = {}
        for name, source in sources.items():
            columns = {key: jnp.asarray(column) for key, column in source.columns.items()}
            parts = lm_loss(models[step], columns)
            sums[name] = np.array([parts.total, parts.weight], np.float64)
            assert figures[f"eval/{name}/loss"] == pytest.approx(float(parts.total / parts.weight), rel=1e-5)
        total, weight = sum(sums.values())
        assert figures["eval/loss"] == pytest.approx(total / weight, rel=1e-5)
        assert figures["eval/perplexity"] == pytest.approx(math.exp(total / weight), rel=1e-5)
    assert validation.traces == 1
    size = trainer.config.eval_batch_size(trainer.mesh)
    n_batches = sum(-(-n // size) for n in (13, 5))
    launched = trainer.hosts.ledger
    assert launched.count >= 3 * n_batches + STEPS


@pytest.mark.slow
def test_stages_and_split_rows_have_the_figures_of_other_meshes():
    found = []
    for mesh_shape in ("auto", "pp=2,fsdp=-1", "fsdp=-1,cp=2"):
        trainer = tiny.make_trainer(mesh_shape, 2)
        validation = Validation(trainer, lm_loss, {"held_out": tiny.rows(13)}, perplexity=True)
        trainer.add_hook(validation, every=2)
        trainer.train(tiny.init_model(trainer), tiny.rows())
        found.append(validation.metrics)
    assert found[1] == pytest.approx(found[0], rel=1e-5) and "eval/held_out/loss" in found[0]
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_pairs_have_accuracy_and_margin_and_fillers_do_not_count():
    loss = SimpoConfig()
    found, _, _, models = run({"held_out": pairs(11)}, loss=loss, train_rows=pairs(16), perplexity=False)
    columns = {key: jnp.asarray(column) for key, column in pairs(11).columns.items()}
    parts = loss(models[4], columns)
    assert float(parts.weight) == 11
    assert set(found[4]) == {
        f"eval{source}/{name}"
        for source in ("", "/held_out")
        for name in (
            "loss",
            "rewards/accuracies",
            "rewards/margins",
            "rewards/chosen",
            "rewards/rejected",
            "logps/chosen",
            "logps/rejected",
        )
    }
    assert found[4]["eval/held_out/loss"] == pytest.approx(float(parts.total) / 11, rel=1e-5)
    assert found[4]["eval/rewards/accuracies"] == pytest.approx(float(parts.metrics["rewards/accuracies"]) / 11)
    assert found[4]["eval/rewards/margins"] == pytest.approx(float(parts.metrics["rewards/margins"]) / 11, rel=1e-4)


def test_training_is_the_same_with_it_and_a_run_that_goes_on_gives_the_same(tmp_path):
    plain, _, _, models = run({"x": rows(13)})
    _, _, _, without = run({"x": rows(13)}, every=1000, num_train_steps=STEPS)
    for a, b in zip(jax.tree.leaves(models[STEPS]), jax.tree.leaves(without[STEPS]), strict=True):
        np.testing.assert_array_equal(a, b)

    def terminate(info):
        if info.next_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {"checkpointer": CheckpointerConfig(every=2), "log_dir": str(tmp_path), "run_id": "run"}
    before, *_ = run({"x": rows(13)}, at=terminate, **settings)
    after, *_ = run({"x": rows(13)}, **settings)
    assert sorted(before) == [2] and sorted(after) == [4, 5]
    assert before | after == plain


def test_rows_that_cannot_be_read_end_the_run_on_all_hosts():
    class Broken(TokenizedRows):
        def take(self, numbers):
            if max(numbers) > 10:
                raise OSError("the disk is gone")
            return super().take(numbers)

    broken = Broken(columns=rows(13).columns, seed=0)
    with pytest.raises(PeerError, match="rows of source 0.*the disk is gone"):
        run({"x": broken})


@pytest.mark.slow
def test_a_launch_that_fails_on_several_hosts_says_which_and_after_which_step():
    """As one of the train step does: the runtime says nothing of a process that has died."""
    mesh = make_mesh("auto", jax.devices()[:1])

    def fail(total):
        raise ConnectionError("connection closed by peer")

    def failing(model, batch):
        parts = lm_loss(model, batch)
        total = jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), parts.total)
        return parts._replace(total=total)

    def body(hosts):
        config = TrainerConfig(num_train_steps=1, train_batch_size=8)
        trainer = Trainer(config, OptimizerConfig().build(1), failing, hosts, mesh=mesh)
        model = trainer.init_model(Bigrams.init)
        validation = Validation(trainer, failing, {"x": rows(8)}, perplexity=False)
        with pytest.raises(HostError, match=f"the eval step after 4 steps failed on process {hosts.index} of 2"):
            validation(StepInfo(step=3, model=model, loss=0.0, step_duration=0.0))

    run_threads(body, 2)


def test_values_that_cannot_work():
    with pytest.raises(ConfigError, match="steps_per_eval is 0; it must be at least 1, or null"):
        TrainerConfig(steps_per_eval=0)
    with pytest.raises(ConfigError, match="per_device_eval_parallelism is 0"):
        TrainerConfig(per_device_eval_parallelism=0)
    mesh = make_mesh("auto")
    assert TrainerConfig(train_batch_size=16).eval_batch_size(mesh) == 16
    assert TrainerConfig(train_batch_size=16, per_device_parallelism=1).eval_batch_size(mesh) == mesh.size
    assert TrainerConfig(train_batch_size=16, per_device_eval_parallelism=3).eval_batch_size(mesh) == 3 * mesh.size
