"""Answers packed into rows: the rule, and the same losses and gradients as with one answer in each row."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from lockstep.placement import batch_spec, place
from lockstep.training import PolicyLoss, Trainer, TrainerConfig, batch_structs
from lockstep.training.objectives import GrpoConfig
from lockstep.training.objectives.policy_loss import LOSSES, policy_loss
from lockstep.training.rl.packing import MOST_ANSWERS, Packing
from tests import rollouts as runs
from tests import tiny

LENGTHS = {
    "GSM8K": np.random.default_rng(0).integers(110, 651, 128),
    "short": np.random.default_rng(1).integers(2, 40, 64),
    "whole rows": np.full(8, 1024),
    "some left out": np.random.default_rng(2).integers(1, 1025, 64) * (np.arange(64) % 3 > 0),
    "none": np.zeros(8, int),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shards", [1, 4])
def test_answers_are_whole_side_by_side_and_in_few_rows(lengths, shards):
    packing = Packing.of(lengths, 1024, shards)
    rows = {}
    for answer in np.flatnonzero(lengths):
        rows.setdefault(packing.rows[answer], []).append(answer)
    for answers in rows.values():
        answers.sort(key=lambda answer: packing.ordinals[answer])
        assert packing.ordinals[answers].tolist() == list(range(len(answers)))
        ends = np.cumsum(lengths[answers])
        assert packing.begins[answers].tolist() == [0, *ends[:-1]] and ends[-1] <= 1024
        assert len(answers) <= MOST_ANSWERS and (np.diff(lengths[answers]) <= 0).all()
    used = sorted(len(answers) < MOST_ANSWERS and lengths[answers].sum() <= 512 for answers in rows.values())
    assert used.count(True) <= 1, "two rows that are half empty would have been one"
    assert packing.filled == len(rows)
    by_device = np.isin(np.arange(len(lengths)), list(rows)).reshape(shards, -1)
    assert (np.diff(by_device.astype(int), axis=1) <= 0).all(), "empty rows come last on each device"
    assert np.ptp(by_device.sum(axis=1)) <= 1, "no device has two rows more than another"


def test_answers_like_those_of_gsm8k_need_less_than_half_of_the_rows():
    lengths = LENGTHS["GSM8K"]
    assert Packing.of(lengths, 1024, 8).filled <= 1.05 * lengths.sum() / 1024 < 0.45 * len(lengths)


VOCAB, ROW = 7, 24
TOKENS = np.random.default_rng(3).integers(6, 25, 16)
"""Prompts with their answers; one of 24 tokens has a row of its own, and some rows have three."""
LEARNED = [answer for answer in range(len(TOKENS)) if answer % 7 != 5]


class Halved(PolicyLoss):
    def token_losses(self, ratio, logprobs, advantage, config):
        losses, clipped = super().token_losses(ratio, logprobs, advantage, config)
        return losses / 2, clipped


def made_up(vocab=VOCAB):
    """The columns of a batch with one answer in each row; nothing is learned from two of them."""
    rng = np.random.default_rng(4)
    position = np.arange(ROW)
    prompts = rng.integers(1, 5, len(TOKENS))[:, None]
    columns = {
        "tokens": np.where(position < TOKENS[:, None], rng.integers(1, vocab, (len(TOKENS), ROW)), 0).astype(np.int32),
        "loss_mask": (position >= prompts)
        & (position < TOKENS[:, None])
        & np.isin(np.arange(len(TOKENS)), LEARNED)[:, None],
        "advantage": rng.standard_normal(len(TOKENS)).astype(np.float32),
    }
    for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs"):
        columns[name] = np.where(columns["loss_mask"], rng.normal(-2.0, 0.3, (len(TOKENS), ROW)), 0).astype(np.float32)
    return columns


def shifted(columns):
    """The token after each position."""
    return np.roll(columns["tokens"], -1, axis=1)[..., None]


EVERYTHING = {
    "kl_coefficient": 0.1, "entropy_coefficient": 0.05, "use_rollout_logprobs": False, "importance_cap": 1.1,
    "importance_level": "sequence", "dual_clip": 1.5, "teacher_coefficient": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("loss", [*LOSSES, f"{__name__}:Halved"])
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["plain", "everything"])
def test_loss_and_gradient_are_those_of_one_answer_in_each_row(loss, values):
    """The gradient is that of the logits, and so of all that comes before them."""
    unused = policy_loss(loss).UNUSED
    config = GrpoConfig(loss=loss, **{name: value for name, value in values.items() if name not in unused})
    columns = made_up()
    columns = {name: columns[name] for name in config.columns(ROW, on_policy=False)}
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((*columns["tokens"].shape, VOCAB)).astype(np.float32)
    before = np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), shifted(columns), -1)[..., 0]
    for name in [name for name in columns if name.endswith("_logprobs")]:  # of policies that are near
        near = np.roll(before, 1, axis=1) + 0.2 * rng.standard_normal(before.shape)
        columns[name] = np.where(columns["loss_mask"], near, 0).astype(np.float32)
    packing = Packing.of(np.where(columns["loss_mask"].any(axis=1), TOKENS, 0), ROW, 2)
    assert packing.filled < 10 and packing.ordinals.max() >= 2

    def mean_loss(logits, batch):
        parts = config(lambda *_: hax.named(logits, ("batch", "position", "vocab")), batch)
        return parts.total / parts.weight, {name: value / parts.weight for name, value in parts.metrics.items()}

    def outcome(logits, batch):
        return jax.value_and_grad(mean_loss, has_aux=True)(jnp.asarray(logits), jax.tree.map(jnp.asarray, batch))

    (padded, metrics), gradient = outcome(logits, columns)
    (packed, packed_metrics), packed_gradient = outcome(
        packing.pack({"logits": logits})["logits"], packing.pack(columns)
    )
    # A loss is a mean of terms of about 1, which nearly cancel out where advantages do.
    assert float(packed) == pytest.approx(float(padded), rel=1e-6, abs=1e-7)
    assert set(metrics) == set(packed_metrics)
    for name, value in metrics.items():
        assert float(packed_metrics[name]) == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
    expected = packing.pack({"gradient": np.asarray(gradient)})["gradient"]
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(packed_gradient, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


class Rows:
    """The same batch in every step (`BatchSource`)."""

    def __init__(self, columns, mesh):
        self._columns, self._mesh = columns, mesh

    def structs(self):
        return batch_structs(
            {name: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype) for name, rows in self._columns.items()},
            len(self._columns["tokens"]),
            self._mesh,
        )

    def batch(self, step, model):
        sharding = NamedSharding(self._mesh, batch_spec(self._mesh))
        return {name: place(rows, sharding) for name, rows in self._columns.items()}

    def prepare(self, step): ...

    def close(self): ...


class PackedRows(Rows):
    filled_rows = 5


def updated(source, columns, model, **trainer_values):
    """The change of the weights by one step of gradient descent, its figures, and how many microbatches it computed."""
    tracker = runs.Recorder()
    config = TrainerConfig(num_train_steps=1, train_batch_size=len(TOKENS), **trainer_values)
    objective = GrpoConfig(loss="gspo", kl_coefficient=0.1)

    def counted(model, batch):
        parts = objective(model, batch)
        return parts._replace(metrics={**parts.metrics, "microbatches": jnp.float32(1)})

    trainer = Trainer(config, optax.sgd(1.0), counted, tracker=tracker)
    initial = runs.drawn(model, trainer.mesh)
    before = jax.tree.map(np.asarray, initial)
    after = trainer.train(initial, source(columns, trainer.mesh)).model
    assert trainer.train_step_traces == 1
    figures = tracker.scalars[1]
    microbatches = figures["train/microbatches"] * len(LEARNED)  # the weight of the figures of all
    return jax.tree.map(lambda a, b: np.asarray(a) - b, after, before), figures, round(microbatches)


# The load-balancing loss is a mean over microbatches, which are others.
EXPERTS = dataclasses.replace(runs.EXPERTS, experts=dataclasses.replace(runs.EXPERTS.experts, load_balancing_coef=0.0))


@pytest.mark.parametrize(
    ("mesh_shape", "shards", "model", "rows_at_a_time"),
    [
        ("auto", 4, tiny.CONFIG, 1),
        pytest.param("1,2,2", 2, tiny.CONFIG, 2, marks=pytest.mark.nightly),
        pytest.param("pp=2,fsdp=-1", 4, tiny.CONFIG, 1, marks=pytest.mark.nightly),
        pytest.param("fsdp=-1,cp=2", 2, tiny.CONFIG, 1, marks=pytest.mark.nightly),
        pytest.param("auto", 4, EXPERTS, 1, marks=pytest.mark.nightly),
    ],
)
def test_an_update_is_that_of_padded_rows(mesh_shape, shards, model, rows_at_a_time):
    """Through attention, positions, microbatches that are left out, and the optimizer."""
    columns = made_up(vocab=tiny.vocab_size())
    del columns["old_logprobs"], columns["teacher_logprobs"]
    packing = Packing.of(np.where(columns["loss_mask"].any(axis=1), TOKENS, 0), ROW, shards)
    values = {"mesh_shape": mesh_shape, "per_device_parallelism": rows_at_a_time}
    padded, figures, _ = updated(Rows, columns, model, **values)
    packed, packed_figures, microbatches = updated(PackedRows, packing.pack(columns), model, **values)
    rows = shards * rows_at_a_time
    needed = 1 if "pp" in mesh_shape else -(-packing.filled // rows)  # stages have all microbatches at once
    assert microbatches == needed < len(TOKENS) / rows
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(padded))
    for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(padded), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * largest)
    for name in ("train/loss", "train/kl", "train/ratio"):
        assert packed_figures[name] == pytest.approx(figures[name], rel=1e-5, abs=1e-6), name
    tokens = {
        name: each["throughput/tokens_per_s"] * sum_of_seconds(each)
        for name, each in (("padded", figures), ("packed", packed_figures))
    }
    assert tokens["padded"] == pytest.approx(len(TOKENS) * ROW) and tokens["packed"] == pytest.approx(5 * ROW)


def sum_of_seconds(figures):
    return figures["throughput/step_duration_s"] + figures["throughput/data_wait_s"]
