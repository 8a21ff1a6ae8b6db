"""Next-token prediction."""

from collections.abc import Mapping
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.training.objectives.parts import LossParts


def token_logprobs(model: Any, tokens: Int[Array, "row position"]) -> Float[Array, "row target"]:
    """Return the log-probability that a model gives to each token but the first, from the tokens before it.

    Args:
        model: Called with a haliax array with axes ``batch, position``; returns logits with one more axis, ``vocab``.
        tokens: Token ids.

    Returns:
        Natural-log probabilities of ``tokens[:, 1:]`` in float32.
    """
    logits = model(hax.named(tokens, ("batch", "position")))
    before = logits.rearrange(("batch", "position", "vocab")).array[:, :-1].astype(jnp.float32)
    picked = jnp.take_along_axis(before, tokens[:, 1:, None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(before, axis=-1)


def lm_loss(model: Any, batch: Mapping[str, Array]) -> LossParts:
    """Return the cross entropy, as a mean over the target tokens.

    Args:
        model: The model in the compute type, called as in `token_logprobs`.
        batch: The columns ``tokens`` ``[row, position]`` and ``loss_mask`` ``[row, position]``, true for each token
            that is a target (the first of a row never is, whatever the mask says).

    Returns:
        Sums with the number of target tokens as the weight.
    """
    mask: Bool[Array, "row target"] = batch["loss_mask"][:, 1:].astype(bool)
    logprobs = token_logprobs(model, batch["tokens"])
    return LossParts(
        total=-jnp.sum(jnp.where(mask, logprobs, 0.0)), weight=jnp.sum(mask, dtype=jnp.float32), metrics={}
    )
