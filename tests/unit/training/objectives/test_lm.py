"""The mean over tokens."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.training import lm_loss
from lockstep.training.objectives import token_logprobs
from tests.unit.training.objectives.tables import table_model


def test_token_logprobs_by_hand():
    logprobs = token_logprobs(table_model, jnp.array([[0, 1, 2, 0]]))
    np.testing.assert_allclose(np.exp(logprobs), [[0.2, 0.25, 0.7]], rtol=1e-6)


def test_lm_loss_is_the_mean_over_unmasked_tokens():
    # Targets: 1 after 0 (0.2), 2 after 1 (masked), 0 after 2 (0.7); the mask of the first token has no effect.
    batch = {"tokens": jnp.array([[0, 1, 2, 0]]), "loss_mask": jnp.array([[True, True, False, True]])}
    parts = lm_loss(table_model, batch)
    assert float(parts.weight) == 2
    assert float(parts.total) == pytest.approx(-math.log(0.2) - math.log(0.7), rel=1e-6)
