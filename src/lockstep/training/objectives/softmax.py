"""The softmax of logits over a temperature, in parts."""

from typing import Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

LOWEST: Final = float(np.finfo(np.float32).min)
"""The score of an id without probability."""
_NO_LOGPROB: Final = -200.0  # log-probabilities below this are of probabilities that are 0 in float32


def softmax_inputs(
    logits: Float[Array, "*token vocab"], ids: Int[Array, " vocab"], temperature: float, vocab_size: int | None
) -> Float[Array, "*token vocab"]:
    """Return logits over the temperature, and a number without probability for ids that are no tokens."""
    scaled = logits if temperature == 1 else logits / temperature
    # The least float32: the difference of two infinities, in a block without a token, would be NaN.
    return scaled if vocab_size is None else jnp.where(ids < vocab_size, scaled, LOWEST)


def weighted(
    probabilities: Float[Array, "*token vocab"], logprobs: Float[Array, "*token vocab"]
) -> Float[Array, "*token vocab"]:
    """Return the terms of a sum of logarithms under a distribution: an id without probability has the term 0."""
    return probabilities * jnp.maximum(logprobs, _NO_LOGPROB)


class SoftmaxSums(NamedTuple):
    """Sums over token ids of a part of the vocabulary, for each token.

    Args:
        highest: The highest score.
        total: The sum of the exponentials of scores less it.
        slant: The sum of these exponentials times their exponents, for the entropy; None for none.
    """

    highest: Array
    total: Array
    slant: Array | None

    def below(self, higher: Array) -> "SoftmaxSums":
        """Return the same sums for another highest score."""
        fall = self.highest - higher
        scale = jnp.exp(fall)
        slant = None if self.slant is None else scale * self.slant + weighted(scale * self.total, fall)
        return SoftmaxSums(higher, self.total * scale, slant)
