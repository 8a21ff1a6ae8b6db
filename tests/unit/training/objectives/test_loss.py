"""The mean over tokens."""

import math

import jax.numpy as jnp
import pytest

from lockstep.training import lm_loss
from tests.unit.training.objectives.tables import table_model


def test_lm_loss_is_the_mean_over_unmasked_tokens():
    # Targets: 1 after 0 (0.2), 2 after 1 (masked), 0 after 2 (0.7); the mask of the first token has no effect.
    batch = {"tokens": jnp.array([[0, 1, 2, 0]]), "loss_mask": jnp.array([[True, True, False, True]])}
    parts = lm_loss(table_model, batch)
    assert float(parts.weight) == 2
    assert float(parts.total) == pytest.approx(-math.log(0.2) - math.log(0.7), rel=1e-6)
