"""The estimators of a divergence, on two distributions whose divergence is known."""

import numpy as np
import pytest

from lockstep.training.objectives.kl import KL_ESTIMATORS

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
