"""Preference objectives: losses of pairs of responses to the same prompt, of which the first is preferred."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import draccus
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.plugins import OpenRegistry
from lockstep.training.objectives.logprobs import LossParts, token_logprobs
from lockstep.training.objectives.targets import target_mask

REFERENCE: Final = "reference_logprobs"
"""The column of the log-probabilities under the frozen model: of responses ``[row, 2]``, or of tokens in GRPO; in KTO
of the response, and the reference point."""


class PairLogprobs(NamedTuple):
    """Log-probabilities of the responses of pairs; index 0 of the last axis is the chosen response, 1 the rejected."""

    policy: Float[Array, "row 2"]  # sums over the tokens of a response, of the model that learns
    length: Int[Array, "row 2"]  # tokens of a response, at least 1
    reference: Float[Array, "row 2"] | None  # sums of the frozen model; None for an objective without one

    @property
    def mean(self) -> Float[Array, "row 2"]:
        """Mean over the tokens of a response, of the model that learns."""
        return self.policy / self.length


class PairLosses(NamedTuple):
    """Loss and implicit rewards of each pair.

    Example:
        >>> import jax.numpy as jnp
        >>> lockstep.training.PairLosses(jnp.ones(4), jnp.zeros((4, 2))).reward.shape
        (4, 2)
    """

    loss: Float[Array, " row"]
    reward: Float[Array, "row 2"]
    metrics: Mapping[str, Float[Array, " row"]] = {}
    """Further metrics by name, averaged over the pairs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceObjective(OpenRegistry, draccus.PluginRegistry, discover_packages_path="lockstep.training.objectives"):
    """Loss of preference pairs: ``type: dpo | cpo | orpo | simpo | kto``, or ``my_module:MyObjective``, your subclass.

    A subclass is a frozen dataclass of its settings with `losses`.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Hinge(lockstep.training.PreferenceObjective):
        ...     beta: float = 1.0
        ...
        ...     def losses(self, pairs):
        ...         rewards = self.beta * pairs.mean
        ...         return lockstep.training.PairLosses(jax.nn.relu(1 - rewards[:, 0] + rewards[:, 1]), rewards)
        ...
        >>> logprobs, mask = jnp.array([[[-0.5, -1.5], [-2.0, -3.0]]]), jnp.ones((1, 2, 2), bool)
        >>> float(Hinge(beta=0.5).parts(logprobs, mask).total)
        0.25
    """

    NEEDS_REFERENCE: ClassVar[bool] = False
    """Whether it compares with a frozen model, the one that training begins with."""
    PAIRS: ClassVar[bool] = True
    """Whether it learns from pairs; False: from single responses with a label."""

    def __post_init__(self) -> None:
        check_fields(self)

    def losses(self, pairs: PairLogprobs) -> PairLosses:
        """Return loss and rewards of each pair, from float32 log-probabilities.

        Args:
            pairs: The pairs. One that fills up a batch has made-up values, and what is returned for it does not count.
        """
        raise NotImplementedError

    def __call__(self, model: Any, batch: Mapping[str, Array]) -> LossParts:
        """Return the loss of a batch of pairs.

        Args:
            model: The model in the compute type, called as in `token_logprobs`.
            batch: The columns ``tokens`` ``[row, 2, position]`` and ``loss_mask`` of the same shape, true for response
                tokens, the chosen response first; with ``NEEDS_REFERENCE`` also ``reference_logprobs`` ``[row, 2]``.

        Returns:
            Sums with the number of pairs as the weight.

        Raises:
            ConfigError: The batch has no ``reference_logprobs``, and the objective needs them.
        """
        return self.parts(token_logprobs(model, batch, targets_only=True), target_mask(batch), batch.get(REFERENCE))

    def reference_logprobs(self, model: Any, batch: Mapping[str, Array]) -> Float[Array, "row 2"]:
        """Return the column ``reference_logprobs`` of a batch: sums over the tokens of each response.

        Args:
            model: The frozen model in the compute type.
            batch: The columns ``tokens`` and ``loss_mask``.
        """
        return jnp.sum(jnp.where(target_mask(batch), token_logprobs(model, batch, targets_only=True), 0.0), axis=-1)

    def check_reference(self, reference: Array | None) -> None:
        """Refuse a batch without the column ``reference_logprobs``."""
        if reference is None:
            raise ConfigError(
                f"{type(self).__name__} compares with a reference model and the batch has no column {REFERENCE}. Set "
                "Trainer.reference to ReferenceLogprobs(...), or give the rows that column."
            )

    def parts(
        self,
        logprobs: Float[Array, "row 2 target"],
        mask: Bool[Array, "row 2 target"],
        reference: Float[Array, "row 2"] | None = None,
    ) -> LossParts:
        """Sum losses and metrics over the pairs.

        Args:
            logprobs: The log-probability of each token.
            mask: True for the tokens of the responses. A pair with an empty one has no weight: it fills up a batch.
            reference: The column of an objective that needs it.

        Returns:
            Sums over the pairs, with the metrics ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``,
            ``rewards/accuracies`` (share of pairs whose chosen response has the higher reward), ``logps/chosen`` and
            ``logps/rejected`` (log-probability of a response), and those of the objective.
        """
        if not self.NEEDS_REFERENCE:
            reference = None
        else:
            self.check_reference(reference)
        counts = jnp.sum(mask, axis=-1)
        real = jnp.all(counts > 0, axis=-1)
        fills = ~real[:, None]
        # A filler looks like responses of probability 1/e, so that no loss and no gradient of it is infinite or nan.
        policy = jnp.where(fills, -1.0, jnp.sum(jnp.where(mask, logprobs, 0.0), axis=-1))
        losses = self.losses(
            PairLogprobs(
                policy=policy,
                length=jnp.where(fills, 1, counts),
                reference=None if reference is None else jnp.where(fills, -1.0, reference),
            )
        )
        chosen, rejected = losses.reward[:, 0], losses.reward[:, 1]
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": chosen > rejected,
            "logps/chosen": policy[:, 0],
            "logps/rejected": policy[:, 1],
            **losses.metrics,
        }
        return LossParts(
            total=jnp.sum(jnp.where(real, losses.loss, 0.0)),
            weight=jnp.sum(real, dtype=jnp.float32),
            metrics={name: jnp.sum(jnp.where(real, values, 0.0)) for name, values in metrics.items()},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmoothedPairs(PreferenceObjective):
    """An objective by the logistic loss of a margin, with the two settings that all of these have."""

    label_smoothing: float = 0.0
    """Share of pairs whose preference is taken to be the wrong way round (cDPO, Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf, equation 3)."""
    sft_weight: float = 0.0
    """Weight of the mean cross entropy of the tokens of the chosen response, which is added (RPO, Pang et al. 2024,
    https://arxiv.org/abs/2404.19733, equation 1)."""

    def check_pairs(self) -> None:
        """Check the two settings."""
        smoothing = ", at which nothing could be learned. 0 is without smoothing."
        check_at_least(self, 0, "label_smoothing", fix=smoothing, below=0.5)
        check_at_least(self, 0, "sft_weight", fix=". RPO's paper uses 1; 0 is none.")

    def smoothed(self, pairs: PairLogprobs, margin: Float[Array, " row"], reward: Float[Array, "row 2"]) -> PairLosses:
        """Return the losses of the pairs, of the margin between the rewards of their responses."""
        right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
        return self.with_sft(pairs, -(1 - self.label_smoothing) * right - self.label_smoothing * wrong, reward)

    def with_sft(self, pairs: PairLogprobs, loss: Float[Array, " row"], reward: Float[Array, "row 2"]) -> PairLosses:
        """Return losses with the cross entropy of the chosen responses."""
        if not self.sft_weight:
            return PairLosses(loss, reward)
        nll = -pairs.mean[:, 0]
        return PairLosses(loss + self.sft_weight * nll, reward, {"nll_loss": nll})
