import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.objectives import GrpoConfig, group_advantages, grpo_parts


def in_numpy(logprobs, old, advantage, mask, epsilon, beta=0.0, reference=None):
    """Equation 3 of arXiv 2402.03300, token by token."""
    total, weight = 0.0, 0
    for row in range(len(logprobs)):
        tokens = np.flatnonzero(mask[row])
        if not len(tokens):
            continue
        weight += 1
        inner = 0.0
        for t in tokens:
            ratio = np.exp(logprobs[row, t] - old[row, t])
            gain = min(ratio * advantage[row], np.clip(ratio, 1 - epsilon, 1 + epsilon) * advantage[row])
            if beta:
                inverse = np.exp(reference[row, t]) / np.exp(logprobs[row, t])
                gain -= beta * (inverse - np.log(inverse) - 1)
            inner += gain
        total -= inner / len(tokens)
    return total, weight


def made_up(rows=5, positions=7, seed=0):
    rng = np.random.default_rng(seed)
    logprobs, old, reference = (-rng.exponential(1.0, (rows, positions)).astype(np.float32) for _ in range(3))
    mask = rng.random((rows, positions)) < 0.6
    mask[1] = False
    advantage = rng.standard_normal(rows).astype(np.float32)
    return logprobs, old, reference, advantage, mask


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("epsilon", [0.05, 0.2])
def test_grpo_is_the_papers_equation(beta, epsilon):
    logprobs, old, reference, advantage, mask = made_up()
    config = GrpoConfig(clip_epsilon=epsilon, kl_coefficient=beta)
    parts = grpo_parts(config, *map(jnp.asarray, (logprobs, old, advantage, mask)), jnp.asarray(reference))
    total, weight = in_numpy(logprobs, old, advantage, mask, epsilon, beta, reference)
    assert float(parts.total) == pytest.approx(total, rel=1e-5)
    assert float(parts.weight) == weight == 4
    assert ("kl" in parts.metrics) == bool(beta)
    assert 0 < float(parts.metrics["clipped"]) / weight < 1


def test_on_policy_the_gradient_is_that_of_the_policy():
    """Where the model is still the one that sampled, the gradient of a token is its advantage over its answer's length,
    whatever the clipping.
    """
    logprobs, _, _, advantage, mask = made_up()

    def total(x):
        return grpo_parts(GrpoConfig(), x, jnp.asarray(logprobs), jnp.asarray(advantage), jnp.asarray(mask)).total

    expected = np.where(mask, -advantage[:, None] / np.maximum(mask.sum(1, keepdims=True), 1), 0)
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(logprobs)), expected, rtol=1e-5)


def test_what_is_masked_counts_for_nothing_however_wild():
    logprobs, old, _, advantage, mask = made_up()
    wild = np.where(mask, old, -1e30)

    def total(x, y):
        return grpo_parts(GrpoConfig(), x, jnp.asarray(y), jnp.asarray(advantage), jnp.asarray(mask)).total

    assert float(total(jnp.asarray(logprobs), wild)) == float(total(jnp.asarray(logprobs), old))
    assert np.isfinite(jax.grad(total)(jnp.asarray(logprobs), wild)).all()


def test_microbatches_add_up():
    logprobs, old, _, advantage, mask = map(jnp.asarray, made_up(rows=6))
    whole = grpo_parts(GrpoConfig(), logprobs, old, advantage, mask)
    halves = [
        grpo_parts(GrpoConfig(), logprobs[part], old[part], advantage[part], mask[part])
        for part in (slice(0, 3), slice(3, 6))
    ]
    assert float(whole.total) == pytest.approx(sum(float(half.total) for half in halves), rel=1e-6)
    assert float(whole.weight) == sum(float(half.weight) for half in halves)


def test_group_advantages():
    found = group_advantages(np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]))
    np.testing.assert_allclose(found[0], [1, -1, -1, 1])
    assert not found[1].any(), "nothing to learn where all answers are equally good"
    np.testing.assert_allclose(found[2], np.array([-0.25, -0.25, -0.25, 0.75]) / np.sqrt(3 / 16), rtol=1e-6)


@pytest.mark.parametrize("values", [{"clip_epsilon": 0.0}, {"clip_epsilon": 1.0}, {"kl_coefficient": -0.1}])
def test_settings_out_of_range(values):
    with pytest.raises(ConfigError, match=f"{next(iter(values))} is .*it must be"):
        GrpoConfig(**values)
