"""The losses of sampled answers against NumPy, written token by token from the equations of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.objectives import GrpoConfig
from lockstep.training.objectives.grpo import KL_ESTIMATORS, differ, group_advantages, grpo_parts
from tests.unit.training.objectives.tables import table_model


def ratio_of(log_new, log_old, tokens, loss):
    """The ratios of an answer's tokens; for GSPO that of the whole answer, equation 7 of arXiv 2507.18071."""
    if loss != "gspo":
        return [np.exp(log_new[t]) / np.exp(log_old[t]) for t in tokens]
    whole = np.prod([np.exp(log_new[t]) for t in tokens]) / np.prod([np.exp(log_old[t]) for t in tokens])
    return [whole ** (1 / len(tokens))] * len(tokens)


def divergence(estimator, log_p, log_q):
    """Divergence of p from q at a sample of p, as http://joschu.net/blog/kl-approx.html writes it, with r = q / p."""
    r = np.exp(log_q) / np.exp(log_p)
    return {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": (r - 1) - np.log(r)}[estimator]


def in_numpy(config, logprobs, advantage, mask, old, drawn=None, trainer_old=None, reference=None):
    """The mean loss of a batch."""
    low, high = config.clip_epsilon, config.clip_epsilon_high or config.clip_epsilon
    answers = []
    for row in range(len(logprobs)):
        tokens = np.flatnonzero(mask[row])
        if not len(tokens):
            continue
        losses = []
        ratios = ratio_of(logprobs[row], old[row], tokens, config.loss)
        for t, ratio in zip(tokens, ratios, strict=True):
            loss = -min(ratio * advantage[row], np.clip(ratio, 1 - low, 1 + high) * advantage[row])
            if config.importance_cap:
                loss *= min(np.exp(trainer_old[row, t]) / np.exp(drawn[row, t]), config.importance_cap)
            if config.kl_coefficient:
                loss += config.kl_coefficient * divergence(config.kl_estimator, logprobs[row, t], reference[row, t])
            losses.append(loss)
        answers.append(losses)
    if config.loss == "dapo":  # equation 8 of arXiv 2503.14476: all tokens count the same
        return sum(map(sum, answers)) / sum(map(len, answers))
    if config.loss == "dr_grpo":  # section 3.2 of arXiv 2503.20783: no 1/|o|, but a constant
        return sum(map(sum, answers)) / (len(answers) * mask.shape[1])
    return np.mean([np.mean(losses) for losses in answers])


def made_up(rows=5, positions=7, seed=0):
    rng = np.random.default_rng(seed)
    names = ("logprobs", "rollout_logprobs", "old_logprobs", "reference_logprobs")
    found = {name: -rng.exponential(1.0, (rows, positions)).astype(np.float32) for name in names}
    found["mask"] = rng.random((rows, positions)) < 0.6
    found["mask"][1] = False
    found["advantage"] = rng.standard_normal(rows).astype(np.float32)
    return found


def parts_of(config, **values):
    return grpo_parts(config, **{name: jnp.asarray(value) for name, value in values.items()})


LOSSES = ("grpo", "dr_grpo", "dapo", "gspo")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "values",
    [
        {"clip_epsilon": 0.05},
        {"clip_epsilon": 0.2, "clip_epsilon_high": 0.28},
        {"kl_coefficient": 0.04},
        {"kl_coefficient": 0.5, "kl_estimator": "k1"},
        {"kl_coefficient": 0.5, "kl_estimator": "k2"},
        {"use_rollout_logprobs": False},
        {"use_rollout_logprobs": False, "importance_cap": 1.5},
    ],
    ids=str,
)
def test_the_loss_is_that_of_the_paper(loss, values):
    config, given = GrpoConfig(loss=loss, **values), made_up()
    parts = parts_of(config, **given)
    old = given["rollout_logprobs" if config.use_rollout_logprobs else "old_logprobs"]
    expected = in_numpy(
        config,
        given["logprobs"],
        given["advantage"],
        given["mask"],
        old,
        given["rollout_logprobs"],
        given["old_logprobs"],
        given["reference_logprobs"],
    )
    assert float(parts.total / parts.weight) == pytest.approx(expected, rel=1e-5)
    assert ("kl" in parts.metrics) == bool(config.kl_coefficient)
    assert ("importance" in parts.metrics) == (config.importance_cap is not None)


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_are_means_over_the_tokens(loss):
    """Means are over each answer, then over the answers; over all tokens where the loss is (DAPO)."""
    given = made_up()
    parts = parts_of(GrpoConfig(loss=loss), **given)
    rows = [(np.flatnonzero(mask), row) for row, mask in enumerate(given["mask"]) if mask.any()]
    entropies = [[-given["logprobs"][row, t] for t in tokens] for tokens, row in rows]
    gaps = [[given["old_logprobs"][row, t] - given["rollout_logprobs"][row, t] for t in tokens] for tokens, row in rows]

    def mean(values):
        return np.mean(sum(values, [])) if loss == "dapo" else np.mean([np.mean(each) for each in values])

    found = {name: float(value / parts.weight) for name, value in parts.metrics.items()}
    assert found["entropy"] == pytest.approx(mean(entropies), rel=1e-5)
    assert found["logprob_gap_signed"] == pytest.approx(mean(gaps), rel=1e-4)
    assert found["logprob_gap"] == pytest.approx(mean([list(np.abs(each)) for each in gaps]), rel=1e-5)
    assert 0 < found["clipped"] < 1


def test_the_first_update_has_a_ratio_of_one_and_the_gradient_of_the_policy():
    """Without old log-probabilities the trainer's own are taken, and no gradient goes through them."""
    given = made_up()
    del given["old_logprobs"]
    config = GrpoConfig(use_rollout_logprobs=False)

    def total(x):
        return parts_of(config, **given | {"logprobs": x})

    parts = total(given["logprobs"])
    assert float(parts.metrics["ratio"] / parts.weight) == pytest.approx(1.0)
    assert float(parts.metrics["ratio_gap"]) == 0
    mask, advantage = given["mask"], given["advantage"]
    expected = np.where(mask, -advantage[:, None] / np.maximum(mask.sum(1, keepdims=True), 1), 0)
    gradient = jax.grad(lambda x: total(x).total)(jnp.asarray(given["logprobs"]))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_the_gradient_of_gspo_is_equation_10():
    """An unclipped answer has its ratio times its advantage times the mean of the gradients of its tokens."""
    given = made_up()
    given["rollout_logprobs"] = given["logprobs"] + 0.01
    config = GrpoConfig(loss="gspo")
    gradient = jax.grad(lambda x: parts_of(config, **given | {"logprobs": x}).total)(jnp.asarray(given["logprobs"]))
    counts = np.maximum(given["mask"].sum(1, keepdims=True), 1)
    expected = np.where(given["mask"], -np.exp(-0.01) * given["advantage"][:, None] / counts, 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_masked_counts_for_nothing_however_wild(loss):
    given = made_up()
    config = GrpoConfig(loss=loss, kl_coefficient=0.1)

    def total(x, values):
        return parts_of(config, **values | {"logprobs": x}).total

    wild = {
        name: np.where(given["mask"], value, -1e30) if name.endswith("_logprobs") else value
        for name, value in given.items()
    }
    x = jnp.asarray(given["logprobs"])
    assert float(total(x, wild)) == float(total(x, given))
    assert np.isfinite(jax.grad(total)(x, wild)).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_launcheres_add_up(loss):
    given, config = made_up(rows=6), GrpoConfig(loss=loss)
    whole = parts_of(config, **given)
    halves = [parts_of(config, **{k: v[part] for k, v in given.items()}) for part in (slice(0, 3), slice(3, 6))]
    assert float(whole.total) == pytest.approx(sum(float(half.total) for half in halves), rel=1e-6)
    assert float(whole.weight) == sum(float(half.weight) for half in halves)


def test_the_loss_of_a_model_reads_the_columns_that_it_names():
    """Through a model: p(1 | 0) = 0.2 against 0.1 when it was sampled is a ratio of 2, clipped at 1.2."""
    config = GrpoConfig()
    batch = {
        "tokens": jnp.array([[0, 1, 0]]),
        "loss_mask": jnp.array([[False, True, False]]),
        "rollout_logprobs": jnp.log(jnp.array([[1.0, 0.1, 1.0]])),
        "advantage": jnp.array([3.0]),
    }
    assert set(config.columns(3, on_policy=True)) == set(batch)
    parts = config(table_model, batch)
    assert float(parts.total / parts.weight) == pytest.approx(-1.2 * 3.0)
    assert float(parts.metrics["ratio"] / parts.weight) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("values", "on_policy", "more"),
    [
        ({}, False, set()),
        ({"use_rollout_logprobs": False}, True, set()),
        ({"use_rollout_logprobs": False}, False, {"old_logprobs"}),
        ({"use_rollout_logprobs": False, "importance_cap": 2.0}, True, set()),
        ({"kl_coefficient": 0.1}, True, {"reference_logprobs"}),
    ],
)
def test_only_columns_that_are_used(values, on_policy, more):
    found = GrpoConfig(**values).columns(9, on_policy=on_policy)
    assert set(found) - {"tokens", "loss_mask", "advantage", "rollout_logprobs"} == more
    assert found["tokens"].shape == (9,) and found["advantage"].shape == ()


def test_group_advantages():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    found = group_advantages(rewards, ddof=0, epsilon=0.0)
    np.testing.assert_allclose(found[0], [1, -1, -1, 1])
    assert not found[1].any(), "nothing to learn where all answers are equally good"
    np.testing.assert_allclose(found[2], np.array([-0.25, -0.25, -0.25, 0.75]) / np.sqrt(3 / 16), rtol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-4, 1e-6], ids=["TRL", "verl"])
def test_advantages_are_the_peers(epsilon):
    """(r - mean) / (std + epsilon), with n - 1 in the denominator of the variance: torch's default."""
    rewards = np.random.default_rng(0).integers(0, 3, (6, 5)) / 2
    mean = rewards.sum(axis=1, keepdims=True) / 5
    deviation = np.sqrt(((rewards - mean) ** 2).sum(axis=1, keepdims=True) / 4)
    np.testing.assert_allclose(
        group_advantages(rewards, epsilon=epsilon), (rewards - mean) / (deviation + epsilon), rtol=1e-5
    )
    assert GrpoConfig().advantage_ddof == 1 and GrpoConfig().advantage_epsilon == 1e-4


def test_rewards_that_hardly_differ_hardly_count():
    almost = np.array([[1.0] * 7 + [1.0 + 2e-6], [1.0] * 7 + [1.0 + 2e-7]])
    found = group_advantages(almost)
    assert 0 < np.abs(found[0]).max() < 0.02 and not found[1].any()
    assert differ(almost).tolist() == [True, False], "what has no advantage has no signal"


def test_dr_grpo_does_not_divide_by_the_deviation():
    found = group_advantages(np.array([[0.0, 0.0, 0.0, 1.0]]), scale=GrpoConfig(loss="dr_grpo").scales_advantages)
    np.testing.assert_allclose(found, [[-0.25, -0.25, -0.25, 0.75]])
    assert GrpoConfig().scales_advantages


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_of_which_nothing_is_learned_has_a_loss_and_a_gradient_of_zero(loss):
    given = made_up() | {"mask": np.zeros((5, 7), bool)}

    def mean(x):
        parts = parts_of(GrpoConfig(loss=loss, kl_coefficient=0.1), **given | {"logprobs": x})
        return parts.total / parts.weight

    value, gradient = jax.value_and_grad(mean)(jnp.asarray(given["logprobs"]))
    assert float(value) == 0 and not gradient.any()


@pytest.mark.parametrize(
    "values",
    [
        {"clip_epsilon": 0.0},
        {"advantage_ddof": 2},
        {"loss": "dr_grpo", "advantage_ddof": 0},
        {"loss": "dr_grpo", "advantage_epsilon": 1e-6},
        {"advantage_epsilon": -1e-4},
        {"clip_epsilon": 1.0},
        {"clip_epsilon_high": 0.0},
        {"kl_coefficient": -0.1},
        {"kl_estimator": "k1"},
        {"importance_cap": 0.5, "use_rollout_logprobs": False},
        {"importance_cap": 2.0},
        {"temperature": 0.0},
    ],
)
def test_settings_out_of_range(values):
    with pytest.raises(ConfigError, match=f"{next(iter(values))} is .*"):
        GrpoConfig(**values)


P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])


def test_k1_and_k3_are_unbiased_and_k2_is_close():
    """Their expectation over p is sum p log(p / q), exactly; k2 differs in the third order."""
    exact = float(np.sum(P * np.log(P / Q)))
    found = {name: float(np.sum(P * np.asarray(estimate(np.log(Q / P))))) for name, estimate in KL_ESTIMATORS.items()}
    assert found["k1"] == pytest.approx(exact, rel=1e-4)
    assert found["k3"] == pytest.approx(exact, rel=1e-4)
    assert found["k2"] != pytest.approx(exact, rel=1e-4) and found["k2"] == pytest.approx(exact, rel=0.1)


def test_k3_is_never_negative_and_k1_is():
    ratios = np.log(Q / P)
    assert (np.asarray(KL_ESTIMATORS["k3"](ratios)) > 0).all()
    assert (np.asarray(KL_ESTIMATORS["k1"](ratios)) < 0).any()
