"""GRPO: policy gradient from groups of completions of the same prompt, without a value model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from lockstep.errors import ConfigError
from lockstep.training.objectives.logprobs import target_mask, token_logprobs
from lockstep.training.objectives.parts import LossParts


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Settings of the GRPO loss.

    Raises:
        ConfigError: A value is out of its range.
    """

    clip_epsilon: float = 0.2
    """The ratio of new to old probability of a token counts up to ``1 + clip_epsilon`` and down to ``1 - ...``."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference model; 0: there is no reference model."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_epsilon < 1:
            raise ConfigError(
                f"clip_epsilon is {self.clip_epsilon}; it must be more than 0 and less than 1. The paper's is 0.2."
            )
        if not self.kl_coefficient >= 0:
            raise ConfigError(
                f"kl_coefficient is {self.kl_coefficient}; it must be at least 0. The paper uses 0.04; 0 is none."
            )

    def __call__(self, model: Any, batch: Mapping[str, Array]) -> LossParts:
        """Return the GRPO loss of sampled completions (Shao et al. 2024, arXiv 2402.03300, equation 3).

        Args:
            model: The model in the compute type, called as in `token_logprobs`.
            batch: The columns ``tokens`` ``[row, position]``; ``loss_mask`` of the same shape, true for the tokens of
                the completion; ``advantage`` ``[row]`` (see `group_advantages`); ``old_logprobs`` ``[row, position]``,
                the log-probability of each token under the model that sampled it; with ``kl_coefficient``, also
                ``reference_logprobs`` of that shape.

        Returns:
            Sums with the number of rows that have a completion as the weight.
        """
        reference = batch["reference_logprobs"][:, 1:] if self.kl_coefficient else None
        return grpo_parts(
            self,
            token_logprobs(model, batch),
            batch["old_logprobs"][:, 1:],
            batch["advantage"],
            target_mask(batch),
            reference,
        )


def grpo_parts(
    config: GrpoConfig,
    logprobs: Float[Array, "row target"],
    old_logprobs: Float[Array, "row target"],
    advantage: Float[Array, " row"],
    mask: Bool[Array, "row target"],
    reference_logprobs: Float[Array, "row target"] | None = None,
) -> LossParts:
    r"""Sum over completions of the mean over their tokens of
    :math:`-\min(r A, \mathrm{clip}(r, 1-\epsilon, 1+\epsilon) A)` and, with a reference,
    :math:`\beta\,(e^{q-p} - (q-p) - 1)` (the paper's equation 4).

    Args:
        config: The clipping range and the weight of the divergence.
        logprobs: The log-probability of each token under the model that learns.
        old_logprobs: The log-probability of each token under the model that sampled it.
        advantage: The advantage of each completion.
        mask: True for the tokens of the completions; a row without any counts for nothing.
        reference_logprobs: The log-probability of each token under the reference model; None without
            ``kl_coefficient``.

    Returns:
        Sums over the completions, with the metrics ``ratio`` (mean over a completion's tokens), ``clipped`` (share of
        its tokens whose gradient the clipping takes away) and, with a reference, ``kl``.
    """
    counts = jnp.sum(mask, axis=-1)
    share = jnp.where(mask, 1.0 / jnp.maximum(counts, 1)[:, None], 0.0)
    # Outside the mask there are no probabilities; zeros keep the ratio there finite, and its gradient too.
    ratio = jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0.0))
    gain = ratio * advantage[:, None]
    clipped_gain = jnp.clip(ratio, 1 - config.clip_epsilon, 1 + config.clip_epsilon) * advantage[:, None]
    losses = -jnp.minimum(gain, clipped_gain)
    metrics = {"ratio": jnp.sum(share * ratio), "clipped": jnp.sum(share * (clipped_gain < gain))}
    if config.kl_coefficient:
        assert reference_logprobs is not None, "kl_coefficient needs reference_logprobs"
        gap = jnp.where(mask, reference_logprobs - logprobs, 0.0)
        divergence = jnp.exp(gap) - gap - 1
        losses = losses + config.kl_coefficient * divergence
        metrics["kl"] = jnp.sum(share * divergence)
    return LossParts(total=jnp.sum(share * losses), weight=jnp.sum(counts > 0, dtype=jnp.float32), metrics=metrics)


def group_advantages(rewards: Float[np.ndarray, "prompt completion"]) -> Float[np.ndarray, "prompt completion"]:
    """Return each completion's reward less the mean of those of its prompt, divided by their standard deviation.

    This is the group-relative advantage of section 4.1.2 of the paper (arXiv 2402.03300).

    Args:
        rewards: The rewards of the completions of each prompt.

    Returns:
        float32; 0 where all completions of a prompt have the same reward.
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    deviation = rewards.std(axis=1, keepdims=True)
    return np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 1e-8).astype(np.float32)
