"""GRPO and its relatives: policy gradients from groups of answers to the same prompt, without a value model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from lockstep.errors import check_at_least
from lockstep.training.objectives.logprobs import (
    LossParts,
    token_logprobs,
    token_logprobs_and_entropies,
)
from lockstep.training.objectives.policy_loss import GrpoFields, mean_shares, policy_loss
from lockstep.training.objectives.targets import target_mask

TEACHER: Final = "teacher_logprobs"
"""The column of the log-probabilities of tokens under a teacher."""


def k1(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the negative log-ratio: unbiased, of high variance, negative for half of the samples.

    Args:
        log_ratio: For each sample of ``p``, the log of ``q / p``, where the divergence is that of ``p`` from ``q``.
    """
    return -log_ratio


def k2(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return half the squared log-ratio: of low variance, biased."""
    return log_ratio**2 / 2


def k3(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the ratio less 1 less the log-ratio: unbiased, never negative (equation 4 of arXiv 2402.03300)."""
    return log_ratio.__array_namespace__().expm1(log_ratio) - log_ratio


KL_ESTIMATORS: Final[Mapping[str, Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
"""Estimators of a Kullback-Leibler divergence from samples (Schulman 2020, http://joschu.net/blog/kl-approx.html), of
arrays of JAX or NumPy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(GrpoFields):
    """The loss of sampled answers, whose policy draws them: the softmax of logits over a temperature."""

    temperature: float = 1.0
    """The temperature of the rollouts."""
    vocab_size: int | None = None
    """The number of ids that may be drawn, from 0; None for all rows of the output layer."""

    def __post_init__(self) -> None:
        self.check_loss()
        greedy = ": greedy answers have no policy gradient. Use that of the rollouts."
        check_at_least(self, 0, "temperature", fix=greedy, above=True)

    def columns(self, row_length: int, *, on_policy: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and type of one row of each column that the loss reads."""

        def row(dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((row_length,), dtype)

        names = ["rollout_logprobs"]
        if self.needs_old_logprobs(on_policy=on_policy):
            names.append("old_logprobs")
        if self.kl_coefficient:
            names.append("reference_logprobs")
        if self.teacher_coefficient:
            names.append(TEACHER)
        return {
            "tokens": row(np.int32),
            "loss_mask": row(np.bool_),
            "advantage": jax.ShapeDtypeStruct((), np.float32),
            **{name: row(np.float32) for name in names},
        }

    def needs_old_logprobs(self, *, on_policy: bool) -> bool:
        """Whether the trainer's log-probabilities of a rollout have to be computed before its first update."""
        return not self.use_rollout_logprobs and (self.kl_in_reward or not on_policy)

    @property
    def divergence(self) -> Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]:
        """The function of ``kl_estimator``."""
        return KL_ESTIMATORS[self.kl_estimator or ("k1" if self.kl_in_reward else "k3")]

    def answer_divergences(
        self, columns: Mapping[str, np.ndarray], answers: Bool[np.ndarray, "row position"]
    ) -> Float[np.ndarray, " row"]:
        r"""Return the divergence of each answer, which ``kl_in_reward`` takes from its reward.

        :math:`\sum_t \mathrm{kl}(\log \pi_{ref}(t) - \log \pi_{old}(t))`, with :math:`\pi_{old}` the policy before the
        first update of the rollout. In NumPy and float64, so that every host has the same bits.

        Args:
            columns: Those of `columns`, with the log-probabilities filled in.
            answers: True for the tokens of the answers, those that nothing is learned from included.
        """
        old = columns["rollout_logprobs" if self.use_rollout_logprobs else "old_logprobs"]
        log_ratio = np.where(answers, columns["reference_logprobs"].astype(np.float64) - old, 0.0)
        divergences: Float[np.ndarray, " row"] = np.sum(self.divergence(_bounded(log_ratio)), axis=1)
        return divergences

    def __call__(self, model: Any, batch: Mapping[str, Array]) -> LossParts:
        """Return the loss of sampled answers, see `grpo_parts`.

        Args:
            model: The model in the compute type, called as in `token_logprobs`.
            batch: The columns ``tokens`` ``[row, position]``; ``loss_mask`` of the same shape, true for the tokens of
                the answer; ``advantage`` ``[row]`` (see `group_advantages`); ``rollout_logprobs``
                ``[row, position]``, the log-probability of each token that the engine drew it with; and of that shape,
                where `columns` has them, ``old_logprobs`` (the trainer's, before the first update of the rollout),
                ``reference_logprobs`` and ``teacher_logprobs``. Rows that hold several answers have ``segment_ids``
                ``[row, position]``, the number of each token's answer in its row from 1 on, 0 for padding, and
                ``advantage`` ``[row, answer]``.
        """
        columns = {name: batch[name][:, 1:] for name in batch if name.endswith("_logprobs")}
        if self.entropy_coefficient:
            columns["logprobs"], columns["entropies"] = token_logprobs_and_entropies(
                model, batch, targets_only=True, **self._softmax
            )
        else:
            columns["logprobs"] = token_logprobs(model, batch, targets_only=True, **self._softmax)
        mask, advantage = target_mask(batch), batch["advantage"]
        if "segment_ids" in batch:
            in_answer = batch["segment_ids"][:, None, 1:] == 1 + jnp.arange(advantage.shape[1])[:, None]
            columns = {name: _for_each_answer(column, in_answer) for name, column in columns.items()}
            mask, advantage = _for_each_answer(mask, in_answer) & _flat(in_answer), advantage.reshape(-1)
        return grpo_parts(self, TokenLogprobs(**columns), advantage, mask)

    def answer_logprobs(
        self,
        model: Any,
        tokens: Int[Array, "row position"],
        segment_ids: Int[Array, "row position"] | None = None,
        loss_mask: Bool[Array, "row position"] | None = None,
    ) -> Float[Array, "row target"]:
        """Return the log-probability of each token but the first under the policy, from the tokens before it.

        Args:
            model: The model in the compute type, called as in `token_logprobs`.
            segment_ids: The number of each token's answer in its row; None: a row has one.
            loss_mask: True for the tokens of the answers, where the others' may be 0; None: all are wanted.
        """
        columns = {"tokens": tokens, "segment_ids": segment_ids, "loss_mask": loss_mask}
        batch = {name: column for name, column in columns.items() if column is not None}
        return token_logprobs(model, batch, targets_only=loss_mask is not None, **self._softmax)

    @property
    def _softmax(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "vocab_size": self.vocab_size}


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _for_each_answer(
    column: Shaped[Array, "row target"], in_answer: Bool[Array, "row answer target"]
) -> Shaped[Array, "row_answer target"]:
    """A row for each answer of a row, all of its tokens where they were: a mask leaves those of the answer."""
    return _flat(jnp.broadcast_to(column[:, None], in_answer.shape))


class TokenLogprobs(NamedTuple):
    """The log-probabilities of tokens under the models that a loss compares."""

    logprobs: Float[Array, "row target"]
    """Those of the model that is trained."""
    rollout_logprobs: Float[Array, "row target"]
    """Those that the engine drew them with."""
    old_logprobs: Float[Array, "row target"] | None = None
    """The trainer's before the first update of the rollout; None where this is the first update, or with
    ``use_rollout_logprobs``."""
    reference_logprobs: Float[Array, "row target"] | None = None
    """Those under the reference model; None without ``kl_coefficient``."""
    teacher_logprobs: Float[Array, "row target"] | None = None
    """Those under the teacher; None without ``teacher_coefficient``."""
    entropies: Float[Array, "row target"] | None = None
    """The entropy of the distribution of each token; None without ``entropy_coefficient``."""


def grpo_parts(
    config: GrpoConfig, tokens: TokenLogprobs, advantage: Float[Array, " row"], mask: Bool[Array, "row target"]
) -> LossParts:
    r"""Sums of the losses of tokens (`PolicyLoss.token_losses`) and, with a reference, :math:`\beta` times the
    divergence from it, unless that is in the reward; less the coefficient of the entropy times its mean.

    With a teacher the advantage of a token is :math:`A + \lambda(\log\pi_T - \log\pi_{old})` with
    ``teacher_coefficient`` as :math:`\lambda`: its mean is less the reverse divergence from the teacher, token by token
    (on-policy distillation: Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, section 3; by the policy gradient of
    Gu et al. 2024, https://arxiv.org/abs/2306.08543, with nothing of later tokens).

    Args:
        mask: True for the tokens of the answers; a row without any counts for nothing.

    Returns:
        Sums with metrics: ``ratio`` and ``ratio_gap`` (its mean, and its mean distance from 1), ``clipped`` (share
        whose gradient the clipping takes away), ``entropy`` (the mean of ``entropies``; without them that of the
        negative log-probabilities, an estimate), ``logprob_gap`` and ``logprob_gap_signed`` (how far the
        log-probabilities of the trainer are from those of the engine for the same weights, while the rollout is new),
        and, where they are used, ``importance``, ``kl``, and ``teacher_kl`` (the mean of
        :math:`\log\pi_{old} - \log\pi_T`). All are those of the policy, at its temperature.
    """
    logprobs, rollout_logprobs, old_logprobs, reference_logprobs, teacher_logprobs, entropies = tokens
    trainer_old = jax.lax.stop_gradient(logprobs) if old_logprobs is None else old_logprobs
    old = rollout_logprobs if config.use_rollout_logprobs else trainer_old
    loss = policy_loss(config.loss)

    # Outside the mask there are no probabilities; zeros keep every ratio there finite, and its gradient too.
    def within(x: Float[Array, "row target"]) -> Float[Array, "row target"]:
        return jnp.where(mask, x, 0.0)

    ratio = jnp.exp(_bounded(loss.log_ratio(within(logprobs - old), mask)))
    token_advantage, of_teacher = advantage[:, None], {}
    if config.teacher_coefficient:
        assert teacher_logprobs is not None, "teacher_coefficient needs teacher_logprobs"
        of_teacher["teacher_kl"] = _bounded(within(old - teacher_logprobs))
        token_advantage = token_advantage - config.teacher_coefficient * of_teacher["teacher_kl"]
    losses, clipped = loss.token_losses(ratio, within(logprobs), token_advantage, config)
    gap = within(jax.lax.stop_gradient(trainer_old) - rollout_logprobs)
    metrics = {
        "ratio": ratio,
        "ratio_gap": jnp.abs(ratio - 1),
        "clipped": clipped,
        "entropy": -logprobs if entropies is None else within(entropies),
        "logprob_gap": jnp.abs(gap),
        "logprob_gap_signed": gap,
        **of_teacher,
    }
    if config.importance_cap is not None:
        metrics["importance"] = _importance(config, gap, config.importance_cap)
        losses = losses * metrics["importance"]
    if config.kl_coefficient:
        assert reference_logprobs is not None, "kl_coefficient needs reference_logprobs"
        metrics["kl"] = config.divergence(_bounded(within(reference_logprobs - logprobs)))
        if not config.kl_in_reward:
            losses = losses + config.kl_coefficient * metrics["kl"]
    shares, weight = mean_shares(mask, loss.MEAN_OVER)
    sums = {name: jnp.sum(shares * values) for name, values in metrics.items()}
    total = jnp.sum(loss.shares(mask) * losses)
    if config.entropy_coefficient:
        assert entropies is not None, "entropy_coefficient needs entropies"
        total = total - config.entropy_coefficient * sums["entropy"]
    return LossParts(total=total, weight=weight, metrics=sums)


LARGEST_LOG_RATIO: Final = 20.0
"""Ratios are within e to this power and its inverse, as verl's: beyond it float32 would make a loss infinite."""


def _bounded(log_ratio: Any) -> Any:
    return log_ratio.__array_namespace__().clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _importance(config: GrpoConfig, gap: Float[Array, "row target"], cap: float) -> Float[Array, "row target"]:
    """The factor of each token's loss, from the log of its old probability by the one that it was drawn with."""
    if config.importance_level == "sequence":
        gap = jnp.broadcast_to(jnp.sum(gap, axis=-1, keepdims=True), gap.shape)
    quotient = jnp.exp(_bounded(gap))
    return jnp.where(quotient > cap, 0.0, quotient) if config.importance_above == "mask" else jnp.minimum(quotient, cap)
