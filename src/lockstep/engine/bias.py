"""Which tokens a request favours, and which it rules out."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.engine.penalties import local_ids


def biases(
    bias_ids: Int[Array, "slot bias_ids"], bias: Float[Array, "slot bias_ids"], first: Array | int, size: int
) -> Float[Array, "slot local_vocab"]:
    """What is added to each logit of this device's part of the vocabulary.

    Args:
        bias_ids: token ids, padded with -1; no id twice.
        bias: of each.
        first: token id that this device's part starts with.
        size: of the part.
    """
    rows = jnp.arange(len(bias_ids))[:, None]
    return jnp.zeros((len(bias_ids), size)).at[rows, local_ids(bias_ids, first, size)].add(bias, mode="drop")


def allowed(
    allowed_ids: Int[Array, "slot allowed_ids"], first: Array | int, size: int
) -> Bool[Array, "slot local_vocab"]:
    """Which tokens of this device's part may be sampled: those listed, or all in a slot that lists none.

    Args:
        allowed_ids: token ids, padded with -1.
        first: token id that this device's part starts with.
        size: of the part.
    """
    rows = jnp.arange(len(allowed_ids))[:, None]
    listed = (
        jnp.zeros((len(allowed_ids), size), bool).at[rows, local_ids(allowed_ids, first, size)].set(True, mode="drop")
    )
    return listed | ~jnp.any(allowed_ids >= 0, axis=1, keepdims=True)


def rule_out_stops(
    logits: Float[Array, "slot local_vocab"],
    stop_ids: Int[Array, "slot stop_ids"],
    early: Bool[Array, " slot"],
    first: Array | int,
) -> Float[Array, "slot local_vocab"]:
    """-inf for the stop tokens of slots that it is too early to stop.

    Args:
        logits: float32.
        stop_ids: padded with -1.
        early: whether this step is before ``min_tokens``.
        first: token id that this device's part starts with.
    """
    size = logits.shape[1]
    places = jnp.where(early[:, None], local_ids(stop_ids, first, size), size)
    return logits.at[jnp.arange(len(logits))[:, None], places].set(-jnp.inf, mode="drop")
