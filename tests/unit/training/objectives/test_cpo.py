"""CPO, and what all objectives of a logistic loss share, against TRL's trainers; settings of all objectives."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.objectives import CpoConfig, DpoConfig, KtoConfig, OrpoConfig, PairLogprobs, SimpoConfig

GOLDEN = Path(__file__).parents[3] / "golden" / "trl_losses.npz"
PEERS = {
    "cpo": CpoConfig(beta=0.5, sft_weight=0.7),
    "cpo_smoothed": CpoConfig(beta=0.5, sft_weight=0.7, label_smoothing=0.1),
    "simpo": SimpoConfig(beta=0.5, gamma_beta_ratio=0.5, sft_weight=0.7),
    "simpo_smoothed": SimpoConfig(beta=0.5, gamma_beta_ratio=0.5, sft_weight=0.7, label_smoothing=0.1),
    "orpo": OrpoConfig(beta=0.5),
}


@pytest.mark.parametrize("case", PEERS)
def test_loss_and_gradient_are_those_of_trl(case):
    golden = np.load(GOLDEN)

    def losses(policy):
        return PEERS[case].losses(PairLogprobs(policy, jnp.asarray(golden["pairs/length"]), None)).loss

    policy = jnp.asarray(golden["pairs/policy"])
    np.testing.assert_allclose(losses(policy), golden[f"pairs/{case}/loss"], rtol=1e-5)
    gradient = jax.grad(lambda x: losses(x).sum())(policy)
    np.testing.assert_allclose(gradient, golden[f"pairs/{case}/gradient"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_the_term_of_the_chosen_response_is_added_to_dpo(loss):
    """RPO: the loss of DPO, and the mean cross entropy of the chosen response."""
    pairs = PairLogprobs(jnp.array([[-6.0, -4.0]]), jnp.array([[3, 2]]), jnp.array([[-5.0, -5.0]]))
    plain, added = (DpoConfig(loss=loss, sft_weight=weight).losses(pairs) for weight in (0.0, 0.5))
    assert float(added.loss[0]) == pytest.approx(float(plain.loss[0]) + 0.5 * 2.0)
    assert added.metrics["nll_loss"].tolist() == [2.0] and not plain.metrics


TOO_LOW_OR_HIGH = {"label_smoothing": 0.5, "sft_weight": -1.0, "beta": 0.0}
OUT_OF_RANGE = [(cls, *value) for cls in (CpoConfig, DpoConfig, SimpoConfig) for value in TOO_LOW_OR_HIGH.items()]
OUT_OF_RANGE += [(KtoConfig, name, 0.0) for name in ("beta", "desirable_weight", "undesirable_weight")]
OUT_OF_RANGE += [(OrpoConfig, "beta", 0.0), (SimpoConfig, "gamma_beta_ratio", -0.1)]


@pytest.mark.parametrize(("cls", "name", "value"), OUT_OF_RANGE)
def test_settings_out_of_range(cls, name, value):
    limit = "at least 0" if value else "more than 0"
    with pytest.raises(ConfigError, match=rf"{name} is {re.escape(str(value))}; it must be {limit}"):
        cls(**{name: value})
