"""A step whose loss is no number or a spike: judged by all hosts from the same figures, left out inside the step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError, DivergenceError
from lockstep.training import CheckpointerConfig, LossSpikeConfig, OptimizerConfig, Trainer, TrainerConfig, lm_loss
from lockstep.training.loop.loss_watch import SKIPS_IN_A_ROW, LossWatch
from lockstep.training.step.train_step import SKIPPED, StepMetrics
from tests.unit.training.bigrams import Bigrams
from tests.unit.training.loop.test_trainer import rows

STEPS = 5


class Poisoned:
    """Rows whose loss is multiplied by a number, which may be nan, at some steps; these steps take no rows."""

    def __init__(self, factors):
        self.factors = factors

    def batch(self, step, batch_size, part):
        taken = step - sum(bad < step for bad in self.factors)
        columns = rows().batch(taken, batch_size, part)
        factor = np.full(part.stop - part.start, self.factors.get(step, 1.0), np.float32)
        return columns | {"factor": factor}


def loss(model, batch):
    parts = lm_loss(model, {name: batch[name] for name in ("tokens", "loss_mask")})
    return parts._replace(total=parts.total * jnp.mean(batch["factor"]))


def run(factors, *, steps=STEPS, restore=False, **values):
    config = TrainerConfig(num_train_steps=steps, train_batch_size=8, **values)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0, lr_schedule="constant")
    trainer = Trainer(config, optimizer.build(steps), loss, schedule=optimizer.schedule(steps))
    found = []
    trainer.add_hook(lambda info: found.append(info.loss))
    state = trainer.restore(Bigrams.init) if restore else None
    result = trainer.train(trainer.init_model(Bigrams.init) if state is None else state, Poisoned(factors))
    assert trainer.train_step_traces == 1
    return found, result, trainer


def leaves(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.model)]


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))


@pytest.fixture(scope="module")
def plain():
    return run({})


@pytest.fixture(scope="module")
def skipped():
    return run({2: math.nan}, steps=STEPS + 1, on_nan="skip")


def test_skipping_costs_nothing_where_no_step_is_bad(plain):
    found, result, trainer = run({}, on_nan="skip")
    assert found == plain[0] and same(result, plain[1]) and result.skipped_steps == 0
    ((before,), (after,)) = (each._step._programs.values() for each in (plain[2], trainer))
    before, after = before.memory(), after.memory()
    # The state is donated to the new one all the same, and no second one is made beside it.
    assert after.alias_size_in_bytes == before.alias_size_in_bytes > 0
    assert after.temp_size_in_bytes <= before.temp_size_in_bytes + before.alias_size_in_bytes // 2


def test_a_skipped_step_is_as_if_its_batch_had_not_been_there(plain, skipped, caplog):
    found, result, _ = skipped
    assert math.isnan(found[2]) and [*found[:2], *found[3:]] == plain[0]
    assert same(result, plain[1])
    assert (result.completed_steps, result.skipped_steps, result.diverged) == (STEPS + 1, 1, False)


def test_stopping_leaves_the_model_as_it_was_before_the_bad_step():
    found, result, _ = run({2: math.inf}, on_nan="stop")
    assert (result.completed_steps, result.diverged, result.stopped_by) == (3, True, None)
    assert len(found) == 2, "no hook sees the bad step"
    assert same(result, run({}, steps=2)[1])


def test_raising_names_the_step_and_what_to_do():
    with pytest.raises(DivergenceError, match=r"step 3 has loss nan and gradient norm nan\. Lower optimizer\.learn"):
        run({2: math.nan})


def test_a_spike_is_skipped_and_a_run_that_goes_on_knows_the_losses_before_it(tmp_path, plain):
    values = {
        "on_nan": "skip",
        "loss_spike": LossSpikeConfig(rolling_interval_length=3, sigma_factor=6.0),
        "checkpointer": CheckpointerConfig(every=2),
        "log_dir": str(tmp_path),
        "run_id": "run",
    }
    whole, result, _ = run({4: 100.0}, steps=6, **values | {"run_id": "whole"})
    assert whole[4] > 50 * whole[3] and result.skipped_steps == 1
    assert [*whole[:4], whole[5]] == plain[0]
    first, _, _ = run({4: 100.0}, steps=4, **values)
    second, resumed, _ = run({4: 100.0}, steps=6, restore=True, **values)
    assert [*first, *second] == whole and resumed.skipped_steps == 1


def metrics(loss, skipped=None, grad_norm=1.0):
    values = {"grad_norm": grad_norm} | ({} if skipped is None else {SKIPPED: skipped})
    return StepMetrics(loss=loss, stop=0, save=False, slow=False, values=values)


def test_the_limit_follows_the_last_good_losses():
    watch = LossWatch("skip", LossSpikeConfig(rolling_interval_length=2, sigma_factor=2.0))
    limits = []
    for value, bad in ((1.0, 0.0), (3.0, 0.0), (9.0, 1.0), (5.0, 0.0)):
        assert watch.judge(1, metrics(value, bad), is_leader=False) is False
        limits.append(watch.limit)
    assert limits == [math.inf, 2 + 2 * 1.0, 4.0, 4 + 2 * 1.0]
    assert watch.skipped == 1
    watch.reset()
    assert (watch.limit, watch.skipped) == (math.inf, 0)


def test_a_spike_ends_a_run_that_raises_and_the_message_has_the_limit():
    watch = LossWatch("raise", LossSpikeConfig(rolling_interval_length=2, sigma_factor=1.0))
    for value in (1.0, 3.0):
        watch.judge(1, metrics(value), is_leader=False)
    with pytest.raises(DivergenceError, match=r"step 3 has loss 4 .* the limit of a loss is 3 \(trainer\.loss_spike\)"):
        watch.judge(3, metrics(4.0), is_leader=False)
    with pytest.raises(DivergenceError, match="gradient norm inf"):
        LossWatch("raise", None).judge(3, metrics(4.0, grad_norm=math.inf), is_leader=False)


def test_skipping_for_ever_ends(caplog):
    watch = LossWatch("skip", None)
    for step in range(SKIPS_IN_A_ROW):
        watch.judge(step, metrics(math.nan, 1.0), is_leader=True)
    assert "training goes on (50 skipped so far)" in caplog.text
    with pytest.raises(DivergenceError, match="the 50 steps before it were bad too"):
        watch.judge(51, metrics(math.nan, 1.0), is_leader=True)


def test_values_out_of_range():
    with pytest.raises(ConfigError, match="rolling_interval_length is 1; it must be at least 2"):
        LossSpikeConfig(rolling_interval_length=1)
    with pytest.raises(ConfigError, match="sigma_factor is 0.0; it must be above 0"):
        LossSpikeConfig(sigma_factor=0.0)
