"""DPO against formulas of the papers written anew in NumPy, float64, with gradients worked out by hand."""

import math

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.objectives import DpoConfig
from tests.unit.training.objectives.tables import MESHES, check_step, pairs, sigmoid, step, sums


def log_ratios():
    *_, table, frozen = pairs()
    return sums(table) - sums(frozen)


@MESHES
@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_dpo_is_equation_7_and_with_smoothing_cdpo(shape, parallelism, smoothing):
    """L = -(1 - e) log s(h) - e log s(-h) with h = b (r_w - r_l); dL/dh = -(1 - e) s(-h) + e s(h)."""
    beta, ratios = 0.3, log_ratios()
    h = beta * (ratios[:, 0] - ratios[:, 1])
    losses = -(1 - smoothing) * np.log(sigmoid(h)) - smoothing * np.log(sigmoid(-h))
    slope = beta * (-(1 - smoothing) * sigmoid(-h) + smoothing * sigmoid(h))
    objective = DpoConfig(beta=beta, label_smoothing=smoothing)
    trainer = check_step(objective, shape, parallelism, losses, np.stack([slope, -slope], 1), beta * ratios)
    assert trainer.train_step_traces == trainer.reference.traces == 1


@MESHES
def test_ipo_is_equation_17(shape, parallelism):
    """L = (h - 1 / (2 b))^2 with h = r_w - r_l; dL/dh = 2 (h - 1 / (2 b))."""
    beta, ratios = 0.4, log_ratios()
    h = ratios[:, 0] - ratios[:, 1]
    slope = 2 * (h - 1 / (2 * beta))
    objective = DpoConfig(beta=beta, loss="ipo")
    check_step(objective, shape, parallelism, slope**2 / 4, np.stack([slope, -slope], 1), beta * ratios)


def test_a_column_of_the_rows_does_as_well_as_the_model():
    computed, read = (step(DpoConfig(), "2,2,1", 1, column=column) for column in (False, True))
    assert read[0] == pytest.approx(computed[0], rel=1e-6)
    np.testing.assert_allclose(read[1], computed[1], atol=1e-6)


def test_a_model_that_is_its_reference_has_the_loss_of_a_coin():
    mask = pairs()[1][..., 1:]
    logprobs = np.full(mask.shape, -1.5, np.float32)
    parts = DpoConfig().parts(logprobs, mask, (logprobs * mask).sum(-1))
    assert float(parts.total / parts.weight) == pytest.approx(math.log(2))
    assert float(parts.metrics["rewards/margins"]) == 0


def test_without_a_reference_there_is_no_loss():
    _, mask, *_ = pairs()
    with pytest.raises(ConfigError, match="DpoConfig compares with a reference model and the batch has no column"):
        DpoConfig().parts(np.zeros(mask[..., 1:].shape, np.float32), mask[..., 1:])


def test_ipo_has_no_smoothing():
    with pytest.raises(ConfigError, match="loss is ipo, which has none"):
        DpoConfig(label_smoothing=0.1, loss="ipo")
