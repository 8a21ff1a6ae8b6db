"""Next-token prediction."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from lockstep.training.objectives.logprobs import target_mask, token_logprobs
from lockstep.training.objectives.parts import LossParts


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
