"""The average of the parameters: the same recurrence as by hand, kept in checkpoints, and what samples are of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.placement import make_mesh
from lockstep.training import CheckpointerConfig, OptimizerConfig, Trainer, TrainerConfig, lm_loss, state_structs
from lockstep.training.step.averaging import average_of, average_parameters
from lockstep.training.step.precision import parse_precision
from tests.unit.training.bigrams import Bigrams
from tests.unit.training.loop.test_trainer import losses, rows

STEPS, DECAY = 4, 0.75


def train(path, steps=STEPS, **values):
    settings = {"checkpointer": CheckpointerConfig(every=1), "log_dir": str(path), "run_id": "run"} | values
    config = TrainerConfig(num_train_steps=steps, train_batch_size=8, **settings)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0, ema_decay=DECAY)
    trainer = Trainer(config, optimizer.build(STEPS), lm_loss, schedule=optimizer.schedule(STEPS))
    seen = []

    class Seeing:
        def on_step(self, info, force=False):
            both = [np.asarray(each.head.array) for each in (info.model, info.eval_model)]
            if not force:
                seen.append((info.loss, *both))

    trainer.add_hook(Seeing())
    state = trainer.restore(Bigrams.init)
    result = trainer.train(trainer.init_model(Bigrams.init) if state is None else state, rows())
    np.testing.assert_array_equal(np.asarray(result.eval_model.head.array), seen[-1][2])
    return seen


def test_the_average_follows_the_parameters_and_changes_no_loss(tmp_path):
    seen = train(tmp_path)
    assert [loss for loss, _, _ in seen[1:]] == losses()[0]
    expected = seen[0][1]
    np.testing.assert_array_equal(seen[0][2], expected)
    for _, parameters, average in seen[1:]:
        expected = DECAY * expected + (1 - DECAY) * parameters
        np.testing.assert_allclose(average, expected, rtol=1e-6)
    assert np.abs(seen[-1][1] - seen[-1][2]).max() > 1e-3


def test_a_run_that_goes_on_has_the_same_average(tmp_path):
    whole = train(tmp_path / "whole", checkpointer=None)
    first = train(tmp_path, steps=2)
    second = train(tmp_path)
    for one, other in zip(whole[1:], [*first[1:], *second], strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_it_is_sharded_as_the_parameters_and_wide_whatever_their_type():
    optimizer = OptimizerConfig(ema_decay=DECAY).build(3)
    state, _ = state_structs(Bigrams.init, optimizer, make_mesh("1,2,2"), parse_precision("p=bf16"))
    average = average_of(state.opt_state)
    for one, other in zip(jax.tree.leaves(average), jax.tree.leaves(state.model), strict=True):
        assert (one.shape, one.sharding) == (other.shape, other.sharding)
        assert (one.dtype, other.dtype) == (jnp.float32, jnp.bfloat16)


def test_an_optimizer_without_one_has_none():
    parameters = {"a": jnp.ones(2)}
    assert average_of(optax.adam(1e-3).init(parameters)) is None
    assert average_of(optax.chain(optax.sgd(0.1), average_parameters(0.5)).init(parameters)) is not None
