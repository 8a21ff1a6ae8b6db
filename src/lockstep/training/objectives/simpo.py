"""SimPO: preference optimisation without a reference model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lockstep.errors import ConfigError
from lockstep.training.objectives.logprobs import target_mask, token_logprobs
from lockstep.training.objectives.parts import LossParts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimpoConfig:
    """Settings of the SimPO loss.

    Raises:
        ConfigError: A value is out of its range.
    """

    beta: float = 2.0
    """Scale of the reward: ``beta`` times the mean log-probability of a response's tokens."""
    gamma_beta_ratio: float = 0.5
    """Target margin ``gamma`` between the rewards, as a fraction of ``beta``."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"beta is {self.beta}; it must be above 0. The paper uses 2.0 to 10.")
        if not self.gamma_beta_ratio >= 0:
            raise ConfigError(
                f"gamma_beta_ratio is {self.gamma_beta_ratio}; it must be at least 0. The paper uses 0.1 to 0.8."
            )

    def __call__(self, model: Any, batch: Mapping[str, Array]) -> LossParts:
        """Return the SimPO loss of pairs of responses (Meng, Xia & Chen 2024, arXiv 2405.14734, equation 6).

        Args:
            model: The model in the compute type, called as in `token_logprobs`.
            batch: The columns ``tokens`` ``[row, 2, position]`` and ``loss_mask`` of the same shape, true for response
                tokens; index 0 of axis 1 is the chosen response, 1 the rejected one.

        Returns:
            Sums with the number of pairs as the weight.
        """
        return simpo_parts(self, token_logprobs(model, batch), target_mask(batch))


def simpo_parts(
    config: SimpoConfig, logprobs: Float[Array, "row 2 target"], mask: Bool[Array, "row 2 target"]
) -> LossParts:
    r"""Sum :math:`-\log\sigma(\beta\,(\bar p_w - \bar p_l) - \gamma)` over pairs, with mean log-probabilities.

    Args:
        config: The settings ``beta`` and ``gamma / beta``.
        logprobs: The log-probability of each token; index 0 of axis 1 is the chosen response, 1 the rejected one.
        mask: True for the tokens of the responses. A pair with an empty one has no weight: it fills up a batch.

    Returns:
        Sums over the pairs, with the metrics ``reward_chosen``, ``reward_rejected``, ``reward_margin`` and ``accuracy``
        (share of pairs whose chosen response has the higher reward).
    """
    counts = jnp.sum(mask, axis=-1)
    real = jnp.all(counts > 0, axis=-1)
    means = jnp.sum(jnp.where(mask, logprobs, 0.0), axis=-1) / jnp.maximum(counts, 1)
    rewards = jnp.where(real[:, None], config.beta * means, 0.0)
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    margin = chosen - rejected
    losses = -jax.nn.log_sigmoid(margin - config.gamma_beta_ratio * config.beta)
    return LossParts(
        total=jnp.sum(jnp.where(real, losses, 0.0)),
        weight=jnp.sum(real, dtype=jnp.float32),
        metrics={
            "reward_chosen": jnp.sum(chosen),
            "reward_rejected": jnp.sum(rejected),
            "reward_margin": jnp.sum(margin),
            "accuracy": jnp.sum(margin > 0, dtype=jnp.float32),
        },
    )
