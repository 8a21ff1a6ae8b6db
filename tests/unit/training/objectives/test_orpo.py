"""ORPO against the formulas of its paper written anew in NumPy, float64, with gradients worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.training.objectives import OrpoConfig
from tests.unit.training.objectives.tables import MESHES, check_step, counts, pairs, sigmoid, sums


@MESHES
def test_orpo_is_equations_6_and_7(shape, parallelism):
    """L = -p_w - l log s(o_w - o_l), p the mean log-probability, o = p - log(1 - e^p); do/dp = 1 / (1 - e^p)."""
    weight = 0.7
    mean = sums(pairs()[2]) / counts()
    odds = np.log(np.exp(mean) / (1 - np.exp(mean)))
    ratio = odds[:, 0] - odds[:, 1]
    losses = -mean[:, 0] - weight * np.log(sigmoid(ratio))
    slope = -weight * sigmoid(-ratio)
    by_mean = np.stack([slope, -slope], 1) / (1 - np.exp(mean)) - [1.0, 0.0]
    check_step(
        OrpoConfig(beta=weight),
        shape,
        parallelism,
        losses,
        by_mean / counts(),
        weight * mean,
        nll_loss=-mean[:, 0].mean(),
        log_odds_ratio=ratio.mean(),
    )


def test_responses_of_probability_0_and_1_have_finite_losses_and_gradients():
    logprobs = jnp.array([[[0.0, 0.0], [-200.0, -300.0]], [[-1e-7, 0.0], [0.0, 0.0]]])
    mask = jnp.ones(logprobs.shape, bool)
    loss, gradient = jax.value_and_grad(lambda x: OrpoConfig().parts(x, mask).total)(logprobs)
    assert np.isfinite(float(loss)) and np.isfinite(np.asarray(gradient)).all()
