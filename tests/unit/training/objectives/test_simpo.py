import math

import jax.numpy as jnp
import pytest

from lockstep.training.objectives import SimpoConfig
from tests.unit.training.objectives.tables import table_model


def test_simpo_by_hand():
    """Equation 6 of arXiv 2405.14734 worked out by hand for beta = 2, gamma = 1.

    Pair 1: chosen tokens log p = -0.5, -1.5 (mean -1.0), rejected -2.0, -3.0, -4.0 (mean -3.0):
    margin 2 * (-1 + 3) = 4, loss = -log sigmoid(4 - 1) = log(1 + e^-3) = 0.0485874.
    Pair 2: chosen -4.0 (mean -4), rejected -2.0, -2.0 (mean -2): margin -4, loss = log(1 + e^5) = 5.0067153.
    """
    logprobs = jnp.array([[[-0.5, -1.5, -9.0], [-2.0, -3.0, -4.0]], [[-9.0, -4.0, -9.0], [-2.0, -2.0, -9.0]]])
    mask = jnp.array([[[1, 1, 0], [1, 1, 1]], [[0, 1, 0], [1, 1, 0]]], bool)
    parts = SimpoConfig(beta=2.0, gamma_beta_ratio=0.5).parts(logprobs, mask)
    assert float(parts.total) == pytest.approx(0.0485874 + 5.0067153, abs=1e-5)
    assert float(parts.weight) == 2
    assert {name: float(value) / 2 for name, value in parts.metrics.items()} == pytest.approx(
        {
            "rewards/chosen": -5.0,
            "rewards/rejected": -5.0,
            "rewards/margins": 0.0,
            "rewards/accuracies": 0.5,
            "logps/chosen": -3.0,
            "logps/rejected": -6.5,
        }
    )


def test_simpo_from_tokens():
    """Through the model: one target each, p(1 | 0) = 0.2 chosen and p(3 | 0) = 0.4 rejected; beta 10, gamma 0."""
    batch = {
        "tokens": jnp.array([[[0, 1, 0], [0, 3, 0]]]),
        "loss_mask": jnp.array([[[False, True, False], [False, True, False]]]),
    }
    parts = SimpoConfig(beta=10.0, gamma_beta_ratio=0.0)(table_model, batch)
    # sigmoid(10 * log(0.2 / 0.4)) = 1 / (1 + 2**10)
    assert float(parts.total) == pytest.approx(math.log(1 + 2**10), rel=1e-5)
    assert float(parts.metrics["rewards/accuracies"]) == 0
