"""KTO against its paper's formula written anew in NumPy, float64, and against TRL's trainer and collator."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.objectives import KtoConfig
from tests.unit.training.objectives.tables import LENGTH, MESHES, ROWS, SYMBOLS, gradient, sigmoid, step, sums

GOLDEN = Path(__file__).parents[3] / "golden" / "trl_losses.npz"


def answers():
    """Tokens, mask and labels of random answers, and two random tables."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, SYMBOLS, (ROWS, LENGTH)).astype(np.int32)
    begins = rng.integers(1, LENGTH, (ROWS, 1))
    ends = begins + 1 + rng.integers(0, LENGTH - begins)
    mask = (np.arange(LENGTH) >= begins) & (np.arange(LENGTH) < ends)
    return tokens, mask, rng.random(ROWS) < 0.4, *rng.normal(size=(2, SYMBOLS, SYMBOLS))


def mismatched(tokens, mask):
    """Each prompt with the completion of the row before it, row by row."""
    rows = []
    for row in range(len(tokens)):
        prompt, completion = tokens[row][: np.argmax(mask[row])], tokens[row - 1][mask[row - 1]]
        whole = [(token, False) for token in prompt] + [(token, True) for token in completion]
        rows.append((whole + [(0, False)] * LENGTH)[:LENGTH])
    pairs = np.array(rows)
    return pairs[..., 0], pairs[..., 1].astype(bool)


@MESHES
@pytest.mark.parametrize("swapped", [False, True])
def test_loss_gradient_and_metrics_are_those_of_the_paper(shape, parallelism, swapped):
    """L = w s(-b (r - z)) of desirable answers, w s(-b (z - r)) of others; dL/dr = -+ w b s (1 - s)."""
    tokens, mask, desirable, *tables = answers()
    policy, frozen = tables[::-1] if swapped else tables
    beta, weights = 0.3, np.where(desirable, 1.5, 0.5)
    own, others = (tokens, mask), mismatched(tokens, mask)
    ratio = sums(policy, *own) - sums(frozen, *own)
    divergence = (sums(policy, *others) - sums(frozen, *others)).mean()
    assert (divergence > 0) == swapped, "once it is clipped"
    point = max(divergence, 0.0)
    sign = np.where(desirable, 1.0, -1.0)
    share = sigmoid(-beta * sign * (ratio - point))
    slope = -sign * weights * beta * share * (1 - share)

    objective = KtoConfig(beta=beta, desirable_weight=1.5, undesirable_weight=0.5)
    columns = {"tokens": tokens, "loss_mask": mask, "desirable": desirable}
    loss, moved, metrics, trainer = step(objective, shape, parallelism, columns=columns, tables=(policy, frozen))
    assert loss == pytest.approx((weights * share).mean(), rel=1e-5)
    np.testing.assert_allclose(moved, gradient(policy, slope, *own) / ROWS, atol=1e-5)
    expected = {
        "kl": point,
        "rewards/chosen": beta * ratio[desirable].mean(),
        "rewards/rejected": beta * ratio[~desirable].mean(),
        "logps/chosen": sums(policy, *own)[desirable].mean(),
        "logps/rejected": sums(policy, *own)[~desirable].mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert trainer.train_step_traces == trainer.reference.traces == 1


def test_loss_gradient_and_reference_point_are_those_of_trl():
    golden = {name.removeprefix("kto/"): value for name, value in np.load(GOLDEN).items() if name.startswith("kto/")}
    objective = KtoConfig(beta=0.4, desirable_weight=1.2, undesirable_weight=0.7)
    mask, desirable = golden["mask"], golden["label"]
    logprobs = np.stack([golden["reference"], golden["kl_reference"], golden["kl_policy"]], axis=-1)
    column = objective.with_reference_point(logprobs, {"loss_mask": np.pad(mask, ((0, 0), (1, 0)))})
    np.testing.assert_allclose(column[:, 1], golden["point"], rtol=1e-5)

    def loss(logprobs):
        parts = objective.answer_parts(logprobs, mask, desirable, column)
        return parts.total / parts.weight

    value, found = jax.value_and_grad(loss)(jnp.asarray(golden["logprobs"]))
    np.testing.assert_allclose(value, golden["loss"], rtol=1e-5)
    np.testing.assert_allclose(found, golden["gradient"], rtol=1e-4, atol=1e-7)


def test_mismatched_pairs_are_those_of_trl():
    """With rows that are cut at their length, as TRL cuts them at ``max_length``."""
    golden = np.load(GOLDEN)
    batch = {name: golden[f"kto/rows/{name}"] for name in ("tokens", "loss_mask")}
    found = KtoConfig().mismatched(batch)
    np.testing.assert_array_equal(found["mismatched_tokens"], golden["kto/rows/mismatched_tokens"])
    np.testing.assert_array_equal(found["mismatched_mask"], golden["kto/rows/mismatched_mask"])


def test_rows_that_fill_up_a_batch_do_not_count():
    tokens, mask, desirable, *_ = answers()
    filled = {"tokens": np.concatenate([tokens, 0 * tokens[:3]]), "loss_mask": np.concatenate([mask, 0 * mask[:3]])}
    objective, alone = KtoConfig(), {"tokens": tokens, "loss_mask": mask}
    pairs, pairs_filled = (objective.mismatched(batch) for batch in (alone, filled))
    for name in ("mismatched_tokens", "mismatched_mask"):
        np.testing.assert_array_equal(pairs[name], pairs_filled[name][:ROWS])
    logprobs = np.random.default_rng(0).normal(size=(ROWS + 3, 3)).astype(np.float32)
    column = objective.with_reference_point(logprobs[:ROWS], alone)
    column_filled = objective.with_reference_point(logprobs, filled)
    np.testing.assert_array_equal(column, column_filled[:ROWS])
    tokens_of = np.full((ROWS + 3, LENGTH - 1), -1.0, np.float32)
    parts = objective.answer_parts(tokens_of[:ROWS], mask[:, 1:], desirable, column)
    labels = np.concatenate([desirable, desirable[:3]])
    whole = objective.answer_parts(tokens_of, filled["loss_mask"][:, 1:].astype(bool), labels, column_filled)
    jax.tree.map(np.testing.assert_allclose, parts, whole)


def test_without_a_reference_there_is_no_loss():
    tokens, mask, desirable, *_ = answers()
    with pytest.raises(ConfigError, match="KtoConfig compares with a reference model and the batch has no column"):
        KtoConfig()(None, {"tokens": tokens, "loss_mask": mask, "desirable": desirable})
