"""KTO: single answers, desirable or not, compared with how far the model has moved on the whole batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lockstep.errors import check_at_least
from lockstep.training.objectives.logprobs import LossParts, token_logprobs
from lockstep.training.objectives.preference import REFERENCE, PreferenceObjective
from lockstep.training.objectives.targets import target_mask

DESIRABLE: Final = "desirable"
"""The column ``[row]`` of the labels of answers."""
_MISMATCHED: Final = ("mismatched_tokens", "mismatched_mask")


@PreferenceObjective.register_subclass("kto")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KtoConfig(PreferenceObjective):
    r"""KTO (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, section 4.1).

    With :math:`r = \log(\pi(y|x)/\pi_{ref}(y|x))` the loss of a desirable answer is
    :math:`\lambda_D(1 - \sigma(\beta(r - z_0)))`, that of another :math:`\lambda_U(1 - \sigma(\beta(z_0 - r)))`. The
    reference point :math:`z_0` is, as in TRL, the mean of :math:`r` over mismatched pairs, at least 0: each prompt of
    the batch with the completion of the row before it, that of the first row with the last one's. No gradient goes
    through it.
    """

    NEEDS_REFERENCE: ClassVar[bool] = True
    PAIRS: ClassVar[bool] = False

    beta: float = 0.1
    """Scale of the reward; the larger, the closer the model stays to the reference."""
    desirable_weight: float = 1.0
    r"""The paper's :math:`\lambda_D`. It makes up for more answers of one kind: TRL advises that
    :math:`\lambda_D n_D / (\lambda_U n_U)`, with the numbers of both kinds, is from 1 to 1.33."""
    undesirable_weight: float = 1.0
    r"""The paper's :math:`\lambda_U`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "beta", fix=". The paper uses 0.1.", above=True)
        for name in ("desirable_weight", "undesirable_weight"):
            check_at_least(self, 0, name, fix=". The paper uses 1 where there are as many of both.", above=True)

    def __call__(self, model: Any, batch: Mapping[str, Array]) -> LossParts:
        """Return the loss of a batch of answers.

        Args:
            model: The model in the compute type, called as in `token_logprobs`.
            batch: The columns ``tokens`` ``[row, position]`` and ``loss_mask`` of the same shape, true for the tokens
                of the answer; ``desirable`` ``[row]``; and ``reference_logprobs`` ``[row, 2]``, see
                `with_reference_point`.

        Returns:
            Sums with the number of rows as the weight, see `answer_parts`.

        Raises:
            ConfigError: The batch has no ``reference_logprobs``.
        """
        self.check_reference(batch.get(REFERENCE))
        logprobs, mask = token_logprobs(model, batch, targets_only=True), target_mask(batch)
        return self.answer_parts(logprobs, mask, batch[DESIRABLE], batch[REFERENCE])

    def answer_parts(
        self,
        logprobs: Float[Array, "row target"],
        mask: Bool[Array, "row target"],
        desirable: Bool[Array, " row"],
        reference: Float[Array, "row 2"],
    ) -> LossParts:
        """Sum losses and metrics over the rows.

        Args:
            logprobs: The log-probability of each token.
            mask: True for the tokens of the answers. A row with an empty one has no weight: it fills up a batch.
            reference: The log-probability of each answer under the reference model, and the reference point.

        Returns:
            Sums, with the metrics ``kl`` (the reference point); ``rewards/chosen`` and ``logps/chosen`` (reward and
            log-probability, means over the desirable answers); ``rewards/rejected`` and ``logps/rejected``.
        """
        real = jnp.any(mask, axis=-1)
        policy = jnp.sum(jnp.where(mask, logprobs, 0.0), axis=-1)
        ratio, point = jnp.where(real, policy - reference[:, 0], 0.0), jnp.where(real, reference[:, 1], 0.0)
        away = jnp.where(desirable, point - ratio, ratio - point)
        weight = jnp.where(desirable, self.desirable_weight, self.undesirable_weight)
        losses = jnp.where(real, weight * jax.nn.sigmoid(self.beta * away), 0.0)
        metrics, weights = {"kl": jnp.sum(point)}, {}
        for name, rows in (("chosen", real & desirable), ("rejected", real & ~desirable)):
            for metric, values in ((f"rewards/{name}", self.beta * ratio), (f"logps/{name}", policy)):
                metrics[metric] = jnp.sum(jnp.where(rows, values, 0.0))
                weights[metric] = jnp.sum(rows, dtype=jnp.float32)
        return LossParts(jnp.sum(losses), jnp.sum(real, dtype=jnp.float32), metrics, weights)

    def mismatched(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return a whole batch with the columns of its mismatched pairs: a prompt, and the completion of another row.

        What does not fit into a row is cut. Rows without targets, which fill up a batch, are the last ones.
        """
        tokens, mask = batch["tokens"], batch["loss_mask"].astype(bool)
        begin = jnp.argmax(mask, axis=-1)[:, None]
        row, position = jnp.arange(len(tokens)), jnp.arange(tokens.shape[1])
        before = jnp.where(row == 0, jnp.sum(jnp.any(mask, axis=-1)) - 1, row - 1)
        source = position - begin + begin[before]
        inside = (position >= begin) & (source < len(position))
        source = jnp.clip(source, 0, len(position) - 1)
        completion, targets = (jnp.take_along_axis(column[before], source, axis=-1) for column in (tokens, mask))
        columns = (jnp.where(position < begin, tokens, jnp.where(inside, completion, 0)), targets & inside)
        return {**batch, **dict(zip(_MISMATCHED, columns, strict=True))}

    def reference_logprobs(self, models: tuple[Any, Any], batch: Mapping[str, Array]) -> Float[Array, "row 3"]:
        """Return the log-probability of each answer under the reference model, and that of each mismatched completion
        under this model and under the one that learns.

        Args:
            models: The model that learns and the reference model, both in the compute type.
            batch: Rows of what `mismatched` returned.
        """
        policy, reference = models
        mismatched = dict(zip(("tokens", "loss_mask"), (batch[name] for name in _MISMATCHED), strict=True))
        answers = ((reference, batch), (reference, mismatched), (policy, mismatched))
        return jnp.stack(
            [super(KtoConfig, self).reference_logprobs(*model_and_batch) for model_and_batch in answers], axis=-1
        )

    def with_reference_point(
        self, logprobs: Float[Array, "row 3"], batch: Mapping[str, Array]
    ) -> Float[Array, "row 2"]:
        """Return the column ``reference_logprobs``: the log-probability of each answer, and the reference point.

        Args:
            logprobs: What `reference_logprobs` returned, for the whole batch.
        """
        answer, reference, policy = jnp.moveaxis(logprobs, -1, 0)
        real = jnp.any(target_mask(batch), axis=-1)
        mean = jnp.sum(jnp.where(real, policy - reference, 0.0)) / jnp.maximum(jnp.sum(real), 1)
        return jnp.stack([answer, jnp.broadcast_to(jnp.maximum(mean, 0.0), answer.shape)], axis=-1)
