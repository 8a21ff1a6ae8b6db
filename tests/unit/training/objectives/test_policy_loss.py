"""Advantages, settings, and losses of a user's own; `test_grpo.py` has the losses of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training import PolicyLoss
from lockstep.training.objectives import GrpoConfig
from lockstep.training.objectives.grpo import TokenLogprobs, grpo_parts
from lockstep.training.objectives.policy_loss import LOSSES, differ, group_advantages


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


REWARDS = np.array([[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("loss", "advantages"),
    [
        ("dr_grpo", [[-0.25, -0.25, -0.25, 0.75], [0, 0, 0, 0]]),
        ("rloo", [[-1 / 3, -1 / 3, -1 / 3, 1], [0, 0, 0, 0]]),  # the mean of the three others is 1/3, or 0
        ("reinforce_plus_plus", (REWARDS - 5 / 8) / (np.std(REWARDS, ddof=1) + 1e-4)),
        (
            "reinforce_plus_plus_baseline",
            np.array([[-0.25, -0.25, -0.25, 0.75], [0, 0, 0, 0]]) / (np.sqrt(0.75 / 7) + 1e-4),
        ),
    ],
)
def test_advantages_of_other_losses(loss, advantages):
    np.testing.assert_allclose(LOSSES[loss]().advantages(REWARDS, GrpoConfig(loss=loss)), advantages, rtol=1e-5)


@pytest.mark.parametrize(
    "values",
    [
        {"clip_epsilon": 0.0},
        {"advantage_ddof": 2},
        {"advantage_ddof": 0, "loss": "dr_grpo"},
        {"advantage_epsilon": 1e-6, "loss": "rloo"},
        {"advantage_epsilon": -1e-4},
        {"clip_epsilon": 1.0},
        {"clip_epsilon_high": 0.0},
        {"kl_coefficient": -0.1},
        {"kl_estimator": "k1"},
        {"kl_estimator": "k3"},
        {"kl_in_reward": True},
        {"entropy_coefficient": -0.01},
        {"importance_cap": 0.5, "use_rollout_logprobs": False},
        {"importance_cap": 2.0},
        {"importance_level": "sequence"},
        {"importance_above": "mask"},
        {"dual_clip": 1.0},
        {"dual_clip": 3.0, "loss": "cispo"},
        {"clip_epsilon": 0.1, "loss": "cispo"},
        {"temperature": 0.0},
    ],
)
def test_settings_out_of_range(values):
    with pytest.raises(ConfigError, match=f"{next(iter(values))} is .*"):
        GrpoConfig(**values)


class Halved(PolicyLoss):
    def token_losses(self, ratio, logprobs, advantage, config):
        losses, clipped = super().token_losses(ratio, logprobs, advantage, config)
        return losses / 2, clipped


def test_a_loss_of_a_users_own_is_a_class():
    tokens = TokenLogprobs(logprobs=jnp.zeros((2, 3)), rollout_logprobs=jnp.full((2, 3), -0.1))
    own, usual = (
        grpo_parts(GrpoConfig(loss=loss), tokens, jnp.array([1.0, -2.0]), jnp.ones((2, 3), bool))
        for loss in (f"{__name__}:Halved", "grpo")
    )
    assert float(own.total) == float(usual.total) / 2 != 0 and own.weight == usual.weight == 2
    with pytest.raises(ConfigError, match="is not a subclass of PolicyLoss"):
        GrpoConfig(loss=f"{__name__}:ConfigError")
    with pytest.raises(
        ConfigError, match="loss is gpso; it must be one of grpo, dr_grpo, dapo, .* or my_module:MyLoss"
    ):
        GrpoConfig(loss="gpso")
