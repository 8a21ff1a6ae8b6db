"""Models whose logits are a table, and what NumPy says of pairs of responses under one."""

import functools
import math

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.placement import make_mesh
from lockstep.training import TokenizedRows, Trainer, TrainerConfig
from lockstep.training.loop.logprobs import ReferenceLogprobs

VOCAB = 4


def table_model(input_ids):
    """Logits of the next token that depend on the present token alone."""
    table = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]]))
    return hax.named(table[input_ids.array] + 3.0, ("batch", "position", "vocab"))


class Table(eqx.Module):
    """A model whose logits are its only parameter, so that gradients can be worked out with NumPy."""

    logits: hax.NamedArray

    @classmethod
    def of(cls, values):
        """A table ``[present token, next token]`` with axes of their own, which the mesh splits."""
        return cls(hax.named(np.asarray(values, np.float32), ("vocab", "embed")))

    def __call__(self, input_ids):
        return self.logits.take("vocab", input_ids).rename({"embed": "vocab"})


ROWS, LENGTH, SYMBOLS = 16, 10, 8


@functools.cache
def pairs():
    """Tokens and mask of random pairs, whose responses have 1 to 7 tokens, and two random tables: learnt and frozen."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, SYMBOLS, (ROWS, 2, LENGTH)).astype(np.int32)
    ends = rng.integers(4, LENGTH + 1, (ROWS, 2, 1))
    mask = (np.arange(LENGTH) >= 3) & (np.arange(LENGTH) < ends)
    tables = rng.normal(size=(2, SYMBOLS, SYMBOLS))
    return tokens, mask, tables[0], tables[1]


def sums(table, tokens=None, mask=None):
    """The log-probability of each response in float64: ``[pair, 2]``, or of rows that are given ``[row]``."""
    if tokens is None:
        tokens, mask, *_ = pairs()
    logprobs = table - np.log(np.exp(table).sum(1, keepdims=True))
    return (logprobs[tokens[..., :-1], tokens[..., 1:]] * mask[..., 1:]).sum(-1)


def counts():
    return pairs()[1].sum(-1)


def gradient(table, by_sum, tokens=None, mask=None):
    """The gradient of the table in float64, given that of the loss by the log-probability of each response."""
    if tokens is None:
        tokens, mask, *_ = pairs()
    share = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    found = np.zeros_like(table)
    for *row, place in np.argwhere(mask[..., 1:]):
        now, after = tokens[*row, place], tokens[*row, place + 1]
        found[now] -= by_sum[*row] * share[now]
        found[now, after] += by_sum[*row]
    return found


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def step(objective, shape, parallelism, column=False, columns=None, tables=None):
    """Loss, gradient, metrics and the trainer of a train step on the pairs, or on other columns and with other tables,
    with plain gradient descent.
    """
    tokens, mask, *own = pairs()
    table, frozen = tables or own
    devices = jax.devices()[: math.prod(map(int, shape.split(",")))]
    config = TrainerConfig(num_train_steps=1, train_batch_size=ROWS, per_device_parallelism=parallelism, mp="f32")
    metrics = {}

    class Kept:
        def log(self, values, *, step):
            metrics.update(values)

        def log_rows(self, name, rows, *, step): ...

        def finish(self): ...

    trainer = Trainer(config, optax.sgd(1.0), objective, mesh=make_mesh(shape, devices), tracker=Kept())
    columns = columns or {"tokens": tokens, "loss_mask": mask}
    if column:
        columns["reference_logprobs"] = sums(frozen).astype(np.float32)
    elif objective.NEEDS_REFERENCE:
        reference = trainer.frozen_copy(trainer.init_model(lambda key: Table.of(frozen)))
        trainer.reference = ReferenceLogprobs(objective, reference, config, trainer.mesh, trainer.hosts)
    start = trainer.init_model(lambda key: Table.of(table))
    rows = TokenizedRows(columns=columns, seed=0, shuffle=False)
    result = trainer.train(start, rows)
    found = {name.removeprefix("train/"): value for name, value in metrics.items() if name.startswith("train/")}
    return result.loss, np.asarray(table - np.asarray(result.model.logits.array)), found, trainer


def check_step(objective, shape, parallelism, losses, by_sum, rewards, **further):
    """The step's loss, gradient and metrics are those of losses ``[pair]``, of their derivatives by the log-probability
    of each response ``[pair, 2]``, and of rewards ``[pair, 2]``.
    """
    loss, found, metrics, trainer = step(objective, shape, parallelism)
    assert loss == pytest.approx(losses.mean(), rel=1e-5)
    np.testing.assert_allclose(found, gradient(pairs()[2], by_sum) / ROWS, atol=1e-5)
    margins, logps = rewards[:, 0] - rewards[:, 1], sums(pairs()[2])
    expected = {
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).mean(),
        "logps/chosen": logps[:, 0].mean(),
        "logps/rejected": logps[:, 1].mean(),
        **further,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert 0 < expected["rewards/accuracies"] < 1, "pairs of both kinds"
    return trainer


MESHES = pytest.mark.parametrize(("shape", "parallelism"), [("1,1,1", -1), ("2,2,1", 1)])
"""One device with all pairs at once, and 2x2 devices with four microbatches."""
