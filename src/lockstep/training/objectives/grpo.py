"""GRPO and its relatives: policy gradients from groups of answers to the same prompt, without a value model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.training.objectives.logprobs import LossParts, target_mask, token_logprobs


def k1(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the negative log-ratio: unbiased, of high variance, negative for half of the samples.

    Args:
        log_ratio: For each sample of ``p``, the log of ``q / p``, where the divergence is that of ``p`` from ``q``.
    """
    return -log_ratio


def k2(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return half the squared log-ratio: of low variance, biased."""
    return jnp.square(log_ratio) / 2


def k3(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the ratio less 1 less the log-ratio: unbiased, never negative (equation 4 of arXiv 2402.03300)."""
    return jnp.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: Final[Mapping[str, Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
"""Estimators of a Kullback-Leibler divergence from samples (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoFields:
    """Settings of the loss of sampled answers."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    """``grpo``: the mean over answers of the mean over their tokens (Shao et al. 2024, https://arxiv.org/abs/2402.03300,
    equation 3). ``dr_grpo``: the sum over tokens, divided by a constant, and advantages that are not divided by their
    standard deviation (Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2). ``dapo``: the mean over all
    tokens (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 8). ``gspo``: the ratio of a whole answer instead
    of that of a token (Zheng et al. 2025, https://arxiv.org/abs/2507.18071, equation 5)."""
    clip_epsilon: float = 0.2
    """The ratio of new to old probability counts down to ``1 - clip_epsilon``, and up to ``1 + clip_epsilon`` where
    ``clip_epsilon_high`` is null. GSPO's paper uses 3e-4."""
    clip_epsilon_high: float | None = None
    """The ratio counts up to ``1 +`` this ("clip-higher"; DAPO's paper uses 0.28, GSPO's 4e-4); null: as
    ``clip_epsilon``."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference model, the model as it was before the first step; 0: there is no
    reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimator of the divergence from the sampled tokens (Schulman 2020, http://joschu.net/blog/kl-approx.html):
    ``k1`` the log-ratio (its gradient has the mean 0: it measures, it does not pull), ``k2`` half its square, ``k3``
    unbiased and never negative, as in GRPO's paper."""
    use_rollout_logprobs: bool = True
    """Whether the old probability in the ratio is that of the engine which sampled; false: the trainer's own, computed
    once more before the first update of a rollout (where there is one update, in the update itself)."""
    advantage_ddof: Literal[0, 1] = 1
    """The denominator of the variance that advantages are scaled with is ``n_generations`` less this: 1, as in TRL and
    verl, or 0."""
    advantage_epsilon: float = 1e-4
    """Added to that deviation, so that rewards which hardly differ hardly count; TRL has 1e-4, verl 1e-6."""
    importance_cap: float | None = None
    """Multiply the loss of a token by the trainer's old probability divided by the one that it was drawn with, at most
    this (truncated importance sampling, Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; 2 is usual). It
    corrects for the engine's rounding, and for filters and penalties (docs/grpo.md). Null: no correction. Needs
    ``use_rollout_logprobs: false``."""

    def check_loss(self) -> None:
        """Check the settings."""
        check_fields(self)
        if not 0 < self.clip_epsilon < 1:
            raise ConfigError(
                f"clip_epsilon is {self.clip_epsilon}; it must be more than 0 and less than 1. The paper's is 0.2."
            )
        high = ". DAPO's paper uses 0.28; null is as clip_epsilon."
        check_at_least(self, 0, "clip_epsilon_high", fix=high, above=True)
        check_at_least(self, 0, "kl_coefficient", fix=". The paper uses 0.04; 0 is none.")
        for name in ("advantage_ddof", "advantage_epsilon"):
            if self.loss == "dr_grpo" and getattr(self, name) != getattr(GrpoFields, name):
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and loss is dr_grpo, which does not divide advantages by a "
                    f"deviation: it would do nothing. Remove {name}, or use another loss."
                )
        if not 0 <= self.advantage_epsilon < 1:
            raise ConfigError(
                f"advantage_epsilon is {self.advantage_epsilon}; it must be at least 0 and less than 1. TRL's is 1e-4."
            )
        if self.kl_estimator != "k3" and not self.kl_coefficient:
            raise ConfigError(
                f"kl_estimator is {self.kl_estimator} and kl_coefficient is 0: it would do nothing. Set kl_coefficient "
                "to more than 0, or remove kl_estimator."
            )
        less = ", or answers that were sampled with the trainer's own probabilities would count less. 2 is usual; "
        check_at_least(self, 1, "importance_cap", fix=f"{less}null is none.")
        if self.importance_cap is not None and self.use_rollout_logprobs:
            raise ConfigError(
                f"importance_cap is {self.importance_cap} and use_rollout_logprobs is true: the ratio then holds the "
                "difference between engine and trainer already. Set use_rollout_logprobs to false, or importance_cap "
                "to null."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(GrpoFields):
    """The loss of sampled answers, whose policy draws them: the softmax of logits over a temperature."""

    temperature: float = 1.0
    """The temperature of the rollouts."""
    vocab_size: int | None = None
    """The number of ids that may be drawn, from 0; None for all rows of the output layer."""

    def __post_init__(self) -> None:
        self.check_loss()
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be more than 0: greedy answers have no policy gradient. "
                "Use that of the rollouts."
            )

    @property
    def scales_advantages(self) -> bool:
        """Whether the advantages of a group are divided by their standard deviation."""
        return self.loss != "dr_grpo"

    def columns(self, row_length: int, *, on_policy: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and type of one row of each column that the loss reads."""

        def row(dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((row_length,), dtype)

        names = ["rollout_logprobs"]
        if self.needs_old_logprobs(on_policy=on_policy):
            names.append("old_logprobs")
        if self.kl_coefficient:
            names.append("reference_logprobs")
        return {
            "tokens": row(np.int32),
            "loss_mask": row(np.bool_),
            "advantage": jax.ShapeDtypeStruct((), np.float32),
            **{name: row(np.float32) for name in names},
        }

    def needs_old_logprobs(self, *, on_policy: bool) -> bool:
        """Whether the trainer's log-probabilities of a rollout have to be computed before its first update."""
        return not self.use_rollout_logprobs and not on_policy

    def __call__(self, model: Any, batch: Mapping[str, Array]) -> LossParts:
        """Return the loss of sampled answers, see `grpo_parts`.

        Args:
            model: The model in the compute type, called as in `token_logprobs`.
            batch: The columns ``tokens`` ``[row, position]``; ``loss_mask`` of the same shape, true for the tokens of
                the answer; ``advantage`` ``[row]`` (see `group_advantages`); ``rollout_logprobs``
                ``[row, position]``, the log-probability of each token that the engine drew it with; and of that shape,
                where `columns` has them, ``old_logprobs`` (the trainer's, before the first update of the rollout) and
                ``reference_logprobs``.
        """
        logprobs = self.answer_logprobs(model, batch["tokens"])
        others = {name: batch[name][:, 1:] for name in batch if name.endswith("_logprobs")}
        return grpo_parts(self, logprobs, batch["advantage"], target_mask(batch), **others)

    def answer_logprobs(self, model: Any, tokens: Int[Array, "row position"]) -> Float[Array, "row target"]:
        """Return the log-probability of each token but the first under the policy, from the tokens before it.

        Args:
            model: The model in the compute type, called as in `token_logprobs`.
        """
        return token_logprobs(model, {"tokens": tokens}, temperature=self.temperature, vocab_size=self.vocab_size)


def grpo_parts(
    config: GrpoConfig,
    logprobs: Float[Array, "row target"],
    advantage: Float[Array, " row"],
    mask: Bool[Array, "row target"],
    rollout_logprobs: Float[Array, "row target"],
    old_logprobs: Float[Array, "row target"] | None = None,
    reference_logprobs: Float[Array, "row target"] | None = None,
) -> LossParts:
    r"""Sums over answers of :math:`-\min(r A, \mathrm{clip}(r, 1-\epsilon, 1+\epsilon_{high}) A)` and, with a
    reference, :math:`\beta` times the divergence from it.

    The ratio :math:`r` is that of a token; for ``gspo`` it is :math:`(\pi(y)/\pi_{old}(y))^{1/|y|}`, the same for all
    tokens of an answer. A token counts :math:`1/|y|` (``grpo``, ``gspo``), 1 with the number of tokens as the weight
    (``dapo``), or 1 with the number of answers times that of the targets of a row as the weight (``dr_grpo``).

    Args:
        mask: True for the tokens of the answers; a row without any counts for nothing.
        rollout_logprobs: The log-probability of each token that the engine drew it with.
        old_logprobs: The trainer's log-probabilities before the first update of the rollout; None where this is the
            first update, or with ``use_rollout_logprobs``.
        reference_logprobs: The log-probability of each token under the reference model; None without
            ``kl_coefficient``.

    Returns:
        Sums with metrics: ``ratio`` and ``ratio_gap`` (its mean, and its mean distance from 1), ``clipped`` (share
        whose gradient the clipping takes away), ``entropy`` (the mean of the negative log-probabilities, an estimate),
        ``logprob_gap`` and ``logprob_gap_signed`` (how far the log-probabilities of the trainer are from those of the
        engine for the same weights, while the rollout is new), and, where they are used, ``importance`` and ``kl``. All
        are those of the policy, at its temperature.
    """
    trainer_old = jax.lax.stop_gradient(logprobs) if old_logprobs is None else old_logprobs
    old = rollout_logprobs if config.use_rollout_logprobs else trainer_old
    counts = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    share, weight = _shares(config, mask, counts)

    # Outside the mask there are no probabilities; zeros keep every ratio there finite, and its gradient too.
    def within(x: Float[Array, "row target"]) -> Float[Array, "row target"]:
        return jnp.where(mask, x, 0.0)

    log_ratio = within(logprobs - old)
    if config.loss == "gspo":
        # Every token of an answer has the answer's ratio; its gradient reaches all tokens through the mean.
        mean = jnp.sum(log_ratio, axis=-1) / jnp.maximum(counts, 1)
        log_ratio = jnp.broadcast_to(mean[:, None], mask.shape)
    ratio = jnp.exp(log_ratio)
    high = config.clip_epsilon if config.clip_epsilon_high is None else config.clip_epsilon_high
    gain = ratio * advantage[:, None]
    clipped_gain = jnp.clip(ratio, 1 - config.clip_epsilon, 1 + high) * advantage[:, None]
    losses = -jnp.minimum(gain, clipped_gain)
    gap = within(jax.lax.stop_gradient(trainer_old) - rollout_logprobs)
    metrics = {
        "ratio": ratio,
        "ratio_gap": jnp.abs(ratio - 1),
        "clipped": clipped_gain < gain,
        "entropy": -logprobs,
        "logprob_gap": jnp.abs(gap),
        "logprob_gap_signed": gap,
    }
    if config.importance_cap is not None:
        metrics["importance"] = jnp.minimum(jnp.exp(gap), config.importance_cap)
        losses = losses * metrics["importance"]
    if config.kl_coefficient:
        assert reference_logprobs is not None, "kl_coefficient needs reference_logprobs"
        metrics["kl"] = KL_ESTIMATORS[config.kl_estimator](within(reference_logprobs - logprobs))
        losses = losses + config.kl_coefficient * metrics["kl"]
    return LossParts(
        total=jnp.sum(share * losses),
        weight=weight,
        metrics={name: _sum(config, mask, share, values) for name, values in metrics.items()},
    )


def _shares(
    config: GrpoConfig, mask: Bool[Array, "row target"], counts: Float[Array, " row"]
) -> tuple[Float[Array, "row target"], Float[Array, ""]]:
    """The weight of each token, and the divisor of the sums."""
    # The loss of a batch without answers is 0, not 0 / 0; beside a count of 1 this is lost in float32.
    answers = jnp.maximum(jnp.sum(counts > 0, dtype=jnp.float32), 1e-30)
    if config.loss == "dapo":
        return mask.astype(jnp.float32), jnp.maximum(jnp.sum(counts), 1e-30)
    if config.loss == "dr_grpo":
        return mask.astype(jnp.float32), answers * mask.shape[1]
    return jnp.where(mask, 1.0 / jnp.maximum(counts, 1)[:, None], 0.0), answers


def _sum(
    config: GrpoConfig, mask: Bool[Array, "row target"], share: Float[Array, "row target"], values: Array
) -> Float[Array, ""]:
    """A metric's sum: a mean over tokens once it is divided by the weight (``dr_grpo``: as ``grpo``)."""
    if config.loss == "dr_grpo":
        counts = jnp.sum(mask, axis=-1, dtype=jnp.float32)
        share = jnp.where(mask, mask.shape[1] / jnp.maximum(counts, 1)[:, None], 0.0)
    return jnp.sum(share * values)


LEAST_SPREAD: Final = 1e-6
"""Rewards of a group whose largest and smallest differ by no more are equal: nothing can be learned from them. Equal
ones in float32 are up to 1e-7 apart."""


def differ(rewards: Float[np.ndarray, "prompt completion"]) -> Bool[np.ndarray, " prompt"]:
    """Return whether the rewards of the answers to each prompt differ, by more than `LEAST_SPREAD`."""
    spread: Bool[np.ndarray, " prompt"] = np.ptp(rewards, axis=1) > LEAST_SPREAD
    return spread


def group_advantages(
    rewards: Float[np.ndarray, "prompt completion"], *, scale: bool = True, ddof: int = 1, epsilon: float = 1e-4
) -> Float[np.ndarray, "prompt completion"]:
    """Return each answer's reward less the mean of those of its prompt, divided by their standard deviation.

    This is the group-relative advantage of section 4.1.2 of GRPO's paper (arXiv 2402.03300), with an epsilon as in TRL
    and verl.

    Args:
        ddof: What the denominator of the deviation is less than the number of answers.

    Returns:
        float32; 0 where the answers to a prompt have equal rewards (`differ`).
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    divisor = rewards.std(axis=1, keepdims=True, ddof=ddof) + epsilon if scale else np.ones_like(centred)
    where = np.broadcast_to(differ(rewards)[:, None], centred.shape)
    return np.divide(centred, divisor, out=np.zeros_like(centred), where=where).astype(np.float32)
