"""The result of an objective, sums so that microbatches add up to the loss of one batch; next-token prediction."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from lockstep.training.objectives.logprobs import target_mask, token_logprobs


class LossParts(NamedTuple):
    """Sums over a (micro)batch. The loss and each metric are the sum over the whole batch divided by ``weight``."""

    total: Float[Array, ""]
    """The sum of losses, float32."""
    weight: Float[Array, ""]
    """The divisor of the sums, e.g. the number of tokens; it must not depend on the parameters."""
    metrics: Mapping[str, Float[Array, ""]]
    """Sums of further metrics by name, with the same weight."""


class LossFn(Protocol):
    """An objective: a pure function of a model in the compute type and a batch of arrays with the row as axis 0."""

    def __call__(self, model: PyTree, batch: Mapping[str, Array], /) -> LossParts:
        """Compute the sums of one (micro)batch inside the train step."""
        ...


def lm_loss(model: Any, batch: Mapping[str, Array]) -> LossParts:
    """Return the cross entropy, as a mean over the target tokens.

    Args:
        model: The model in the compute type, called as in `token_logprobs`.
        batch: The columns ``tokens`` ``[row, position]`` and ``loss_mask`` ``[row, position]``, true for each token
            that is a target (the first of a row, or of a document, never is, whatever the mask says); for packed rows
            also ``segment_ids`` ``[row, position]``, the document of each token from 1 on, 0 for padding.

    Returns:
        Sums with the number of target tokens as the weight.

    Example:
        >>> import jax.numpy as jnp
        >>> batch = {"tokens": jnp.ones((2, 8), jnp.int32), "loss_mask": jnp.ones((2, 8), bool)}
        >>> parts = jax.eval_shape(lockstep.training.lm_loss, model, batch)
        >>> parts.total.shape
        ()
    """
    mask, logprobs = target_mask(batch), token_logprobs(model, batch)
    return LossParts(
        total=-jnp.sum(jnp.where(mask, logprobs, 0.0)), weight=jnp.sum(mask, dtype=jnp.float32), metrics={}
    )
