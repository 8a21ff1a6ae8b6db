"""The losses of sampled answers against NumPy, written token by token from the equations of the papers."""

from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.training.objectives import GrpoConfig
from lockstep.training.objectives.grpo import KL_ESTIMATORS, TokenLogprobs, grpo_parts
from lockstep.training.objectives.policy_loss import LOSSES
from tests.unit.training.objectives.tables import table_model


def ratio_of(log_new, log_old, tokens, loss):
    """The ratios of an answer's tokens; of the whole answer for RLOO, and for GSPO (equation 7 of arXiv 2507.18071)."""
    if loss not in ("gspo", "rloo"):
        return [np.exp(log_new[t]) / np.exp(log_old[t]) for t in tokens]
    whole = np.prod([np.exp(log_new[t]) for t in tokens]) / np.prod([np.exp(log_old[t]) for t in tokens])
    return [whole ** (1 / len(tokens) if loss == "gspo" else 1)] * len(tokens)


def loss_of_token(config, ratio, advantage, log_new):
    """The loss of a token, as the papers write it."""
    low, high = config.clip_epsilon, config.clip_epsilon_high or config.clip_epsilon
    if config.loss == "cispo":  # equation 4 of arXiv 2506.13585
        return -min(ratio, 1 + high) * advantage * log_new
    gain = min(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    if config.dual_clip and advantage < 0:  # equation 5 of arXiv 1912.09729
        gain = max(gain, config.dual_clip * advantage)
    return -gain


def importance_of(config, log_old, log_drawn, tokens):
    """The factor of each token of an answer."""
    if not config.importance_cap:
        return [1.0] * len(tokens)
    quotients = [np.exp(log_old[t]) / np.exp(log_drawn[t]) for t in tokens]
    if config.importance_level == "sequence":
        quotients = [np.prod(quotients)] * len(tokens)
    above = 0.0 if config.importance_above == "mask" else config.importance_cap
    return [above if quotient > config.importance_cap else quotient for quotient in quotients]


def divergence(estimator, log_p, log_q):
    """Divergence of p from q at a sample of p, as http://joschu.net/blog/kl-approx.html writes it, with r = q / p."""
    r = np.exp(log_q) / np.exp(log_p)
    return {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": (r - 1) - np.log(r)}[estimator]


def in_numpy(
    config, logprobs, advantage, mask, old, drawn=None, trainer_old=None, reference=None, entropies=None, teacher=None
):
    """The mean loss of a batch."""
    answers, bonuses = [], []
    for row in range(len(logprobs)):
        tokens = np.flatnonzero(mask[row])
        if not len(tokens):
            continue
        losses = []
        ratios = ratio_of(logprobs[row], old[row], tokens, config.loss)
        factors = importance_of(config, trainer_old[row], drawn[row], tokens)
        for t, ratio, factor in zip(tokens, ratios, factors, strict=True):
            gain = advantage[row]
            if teacher is not None:  # less the divergence from the teacher at this token
                gain -= config.teacher_coefficient * divergence("k1", old[row, t], teacher[row, t])
            loss = factor * loss_of_token(config, ratio, gain, logprobs[row, t])
            if config.kl_coefficient and not config.kl_in_reward:
                loss += config.kl_coefficient * divergence(
                    config.kl_estimator or "k3", logprobs[row, t], reference[row, t]
                )
            losses.append(loss)
        answers.append(losses)
        bonuses.append([] if entropies is None else [config.entropy_coefficient * entropies[row, t] for t in tokens])
    bonus = 0.0
    if config.entropy_coefficient:  # section 4 of arXiv 1602.01783
        bonus = np.mean(sum(bonuses, []) if config.loss in OVER_TOKENS else [np.mean(each) for each in bonuses])
    if config.loss in OVER_TOKENS:  # equation 8 of arXiv 2503.14476: all tokens count the same
        return sum(map(sum, answers)) / sum(map(len, answers)) - bonus
    if config.loss == "dr_grpo":  # section 3.2 of arXiv 2503.20783: no 1/|o|, but a constant
        return sum(map(sum, answers)) / (len(answers) * mask.shape[1]) - bonus
    return np.mean([np.mean(losses) for losses in answers]) - bonus


def made_up(rows=5, positions=7, seed=0):
    rng = np.random.default_rng(seed)
    names = ("logprobs", "rollout_logprobs", "old_logprobs", "reference_logprobs")
    found = {name: -rng.exponential(1.0, (rows, positions)).astype(np.float32) for name in names}
    found["mask"] = rng.random((rows, positions)) < 0.6
    found["mask"][1] = False
    found["advantage"] = rng.standard_normal(rows).astype(np.float32)
    return found


def parts_of(config, **values):
    arrays = {name: jnp.asarray(value) for name, value in values.items()}
    advantage, mask = arrays.pop("advantage"), arrays.pop("mask")
    return grpo_parts(config, TokenLogprobs(**arrays), advantage, mask)


OVER_TOKENS = ("dapo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


IMPORTANCE = {"use_rollout_logprobs": False, "importance_cap": 1.3}
PEERS = {
    "grpo": {},
    "grpo_kl": {"kl_coefficient": 0.3},
    "grpo_dual_clip": {"dual_clip": 1.5},
    "dr_grpo": {"loss": "dr_grpo"},
    "dapo": {"loss": "dapo"},
    "gspo": {"loss": "gspo", "clip_epsilon": 0.05, "clip_epsilon_high": 0.07},
    "cispo": {"loss": "cispo"},
    "rloo": {"loss": "rloo"},
    "importance_token_truncate": IMPORTANCE,
    "importance_token_mask": IMPORTANCE | {"importance_above": "mask"},
    "importance_sequence_truncate": IMPORTANCE | {"importance_level": "sequence"},
    "importance_sequence_mask": IMPORTANCE | {"importance_level": "sequence", "importance_above": "mask"},
}


GOLDEN = Path(__file__).parents[3] / "golden" / "trl_losses.npz"


@pytest.mark.parametrize("case", PEERS)
def test_loss_and_gradient_are_those_of_trl(case):
    golden = np.load(GOLDEN)
    config = GrpoConfig(**{"clip_epsilon_high": 0.28} | PEERS[case])
    given = {name: golden[name] for name in ("old_logprobs", "reference_logprobs", "mask", "advantage")}
    # Without a correction TRL's old probabilities are the engine's.
    given["rollout_logprobs"] = golden["drawn_logprobs" if config.importance_cap else "old_logprobs"]

    def mean(x):
        parts = parts_of(config, **given, logprobs=x)
        return parts.total / parts.weight

    loss, gradient = jax.value_and_grad(mean)(jnp.asarray(golden["logprobs"]))
    assert float(loss) == pytest.approx(float(golden[f"{case}/loss"]), rel=1e-5)
    np.testing.assert_allclose(gradient, golden[f"{case}/gradient"], rtol=1e-4, atol=1e-6)


def table(logits):
    """A model whose logits are those of a table, whatever the tokens are; the last position has none that count."""
    rows = jnp.pad(logits, ((0, 0), (0, 1), (0, 0)))
    return lambda tokens: hax.named(rows, (*tokens.axes, "vocab"))


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_the_entropy_bonus_and_its_gradient_are_those_of_trl(loss):
    """From the logits on: TRL's mean is over all tokens, as that of these losses is."""
    golden = np.load(GOLDEN)
    config = GrpoConfig(loss=loss, clip_epsilon_high=0.28, entropy_coefficient=0.4)
    columns = {name: np.pad(golden[name], ((0, 0), (1, 0))) for name in ("mask", "old_logprobs", "entropy/tokens")}
    batch = {
        "tokens": columns["entropy/tokens"].astype(np.int32),
        "loss_mask": columns["mask"],
        "rollout_logprobs": columns["old_logprobs"],
        "advantage": golden["advantage"],
    }

    def mean(logits):
        parts = config(table(logits), {name: jnp.asarray(column) for name, column in batch.items()})
        return parts.total / parts.weight, parts.metrics["entropy"] / parts.weight

    (value, entropy), gradient = jax.value_and_grad(mean, has_aux=True)(jnp.asarray(golden["entropy/logits"]))
    assert float(value) == pytest.approx(float(golden[f"{loss}_entropy/loss"]), rel=1e-5)
    np.testing.assert_allclose(gradient, golden[f"{loss}_entropy/gradient"], rtol=1e-4, atol=1e-6)
    assert float(entropy) == pytest.approx(float(golden["entropy/mean"]), rel=1e-5)


def test_the_advantages_with_a_divergence_in_the_reward_are_those_of_trl():
    """RLOO's, with k1 as TRL has it, of rewards in two groups of three."""
    golden = np.load(GOLDEN)
    config = GrpoConfig(loss="rloo", kl_coefficient=0.3, kl_in_reward=True)
    columns = {"rollout_logprobs": golden["old_logprobs"], "reference_logprobs": golden["reference_logprobs"]}
    divergences = config.answer_divergences(columns, golden["mask"])
    rewards = golden["advantage"].reshape(2, 3) - 0.3 * divergences.reshape(2, 3)
    advantages = LOSSES["rloo"]().advantages(rewards, config)
    np.testing.assert_allclose(advantages.reshape(-1), golden["rloo_kl_in_reward/advantages"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("use_rollout", [True, False])
def test_the_divergence_of_an_answer_is_the_sum_of_those_of_its_tokens(estimator, use_rollout):
    """By default k1 (equation 2 of arXiv 2203.02155), of the policy before the first update."""
    config = GrpoConfig(kl_coefficient=0.5, kl_in_reward=True, kl_estimator=estimator, use_rollout_logprobs=use_rollout)
    columns = made_up()
    answers = columns["mask"]
    old = columns["rollout_logprobs" if use_rollout else "old_logprobs"]
    expected = [
        sum(divergence(estimator or "k1", old[row, t], columns["reference_logprobs"][row, t]) for t in tokens)
        for row, tokens in enumerate(map(np.flatnonzero, answers))
    ]
    np.testing.assert_allclose(config.answer_divergences(columns, answers), expected, rtol=1e-4, atol=1e-6)
    assert "old_logprobs" in config.columns(7, on_policy=True) or use_rollout, "also where there is one update"


CLIPPED = [
    {"clip_epsilon": 0.05},
    {"clip_epsilon": 0.2, "clip_epsilon_high": 0.28},
    {"dual_clip": 1.5},
    {"use_rollout_logprobs": False, "importance_cap": 1.5},
    {"entropy_coefficient": 0.3},
]
CORRECTED = [
    {"kl_coefficient": 0.04},
    {"kl_coefficient": 0.5, "kl_estimator": "k1"},
    {"kl_coefficient": 0.5, "kl_estimator": "k2"},
    {"kl_coefficient": 0.5, "kl_in_reward": True},
    {"use_rollout_logprobs": False},
    {"use_rollout_logprobs": False, "importance_cap": 1.5, "importance_above": "mask"},
    {"use_rollout_logprobs": False, "importance_cap": 1.2, "importance_level": "sequence"},
    {"use_rollout_logprobs": False, "importance_cap": 1.2, "importance_level": "sequence", "importance_above": "mask"},
]


@pytest.mark.parametrize(
    ("loss", "values"),
    [
        *((loss, values) for loss in LOSSES for values in CLIPPED),
        *((loss, values) for loss in ("grpo", "dapo") for values in CORRECTED),
    ],
    ids=str,
)
def test_the_loss_is_that_of_the_paper(loss, values):
    values = {name: value for name, value in values.items() if name not in LOSSES[loss].UNUSED}
    config, given = GrpoConfig(loss=loss, **values), made_up()
    entropies = np.random.default_rng(1).exponential(1.0, given["mask"].shape).astype(np.float32)
    given |= {"entropies": entropies} if config.entropy_coefficient else {}
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
        entropies,
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
        return np.mean(sum(values, [])) if loss in OVER_TOKENS else np.mean([np.mean(each) for each in values])

    found = {name: float(value / parts.weight) for name, value in parts.metrics.items()}
    assert found["entropy"] == pytest.approx(mean(entropies), rel=1e-5)
    assert found["logprob_gap_signed"] == pytest.approx(mean(gaps), rel=1e-4)
    assert found["logprob_gap"] == pytest.approx(mean([list(np.abs(each)) for each in gaps]), rel=1e-5)
    assert found["clipped"] == 0 if loss == "cispo" else 0 < found["clipped"] < 1


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


def test_the_gradient_of_cispo_reaches_every_token():
    """Equation 4: its weight times its advantage, also where PPO's clipping would take it away."""
    given, config = made_up(), GrpoConfig(loss="cispo", clip_epsilon_high=0.28)
    gradient = jax.grad(lambda x: parts_of(config, **given | {"logprobs": x}).total)(jnp.asarray(given["logprobs"]))
    weight = np.minimum(np.exp(given["logprobs"] - given["rollout_logprobs"]), 1.28)
    expected = np.where(given["mask"], -weight * given["advantage"][:, None], 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_the_gradient_of_rloo_is_that_of_the_whole_answer():
    """At a ratio of 1 the mean over the answers of -A times the sum of the gradients of their tokens."""
    given, config = made_up(), GrpoConfig(loss="rloo")
    given["rollout_logprobs"] = given["logprobs"]
    gradient = jax.grad(lambda x: parts_of(config, **given | {"logprobs": x}).total)(jnp.asarray(given["logprobs"]))
    np.testing.assert_allclose(gradient, np.where(given["mask"], -given["advantage"][:, None], 0), rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_ratio_beyond_float32_beside_a_negative_advantage_is_finite(loss):
    """An answer whose probability rose from e^-200 to 1 ended training: its loss was infinite."""
    given = made_up() | {"mask": np.ones((5, 7), bool)}
    given["rollout_logprobs"][:] = -200
    given["logprobs"][:] = 0
    given["reference_logprobs"][:] = 200
    config = GrpoConfig(loss=loss, kl_coefficient=0.1)

    def mean(x):
        parts = parts_of(config, **given | {"logprobs": x, "advantage": np.full(5, -1.0, np.float32)})
        return parts.total / parts.weight

    value, gradient = jax.value_and_grad(mean)(jnp.asarray(given["logprobs"]))
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_of_which_nothing_is_learned_has_a_loss_and_a_gradient_of_zero(loss):
    given = made_up() | {"mask": np.zeros((5, 7), bool)}

    def mean(x):
        parts = parts_of(GrpoConfig(loss=loss, kl_coefficient=0.1), **given | {"logprobs": x})
        return parts.total / parts.weight

    value, gradient = jax.value_and_grad(mean)(jnp.asarray(given["logprobs"]))
    assert float(value) == 0 and not gradient.any()


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
