"""Repetition, frequency and presence penalties: the tokens that a sequence has, counted on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TokenCounts(NamedTuple):
    """What each slot has of this device's part of the vocabulary."""

    prompt: Bool[Array, "slot local_vocab"]
    answer: Int[Array, "slot local_vocab"]
    """How often."""


def local_ids(ids: Int[Array, "..."], first: Array | int, size: int) -> Int[Array, "..."]:
    """Places of token ids in this device's part; ``size``, which a scatter drops, where they are not in it."""
    return jnp.where((ids >= first) & (ids < first + size), ids - first, size)


def count_tokens(
    history: Int[Array, "slot length"], prompt_length: Int[Array, " slot"], first: Array | int, size: int
) -> TokenCounts:
    """Counts the tokens that a launch starts with.

    Args:
        history: prompt and answer, padded with -1.
        prompt_length: tokens of the prompt.
        first: token id that this device's part starts with.
        size: of the part.
    """
    slots, length = history.shape
    rows, places = jnp.arange(slots)[:, None], local_ids(history, first, size)
    answered = jnp.arange(length) >= prompt_length[:, None]
    prompt = jnp.zeros((slots, size), bool).at[rows, jnp.where(answered, size, places)].set(True, mode="drop")
    answer = jnp.zeros((slots, size), jnp.int32).at[rows, jnp.where(answered, places, size)].add(1, mode="drop")
    return TokenCounts(prompt, answer)


def add_token(
    seen: TokenCounts, token: Int[Array, " slot"], active: Bool[Array, " slot"], first: Array | int
) -> TokenCounts:
    """Counts one more token of each active slot."""
    slots, size = seen.answer.shape
    places = jnp.where(active, local_ids(token, first, size), size)
    return seen._replace(answer=seen.answer.at[jnp.arange(slots), places].add(1, mode="drop"))


def penalise(
    logits: Float[Array, "slot local_vocab"], seen: TokenCounts, penalties: Float[Array, "slot 3"]
) -> Float[Array, "slot local_vocab"]:
    """Logits after the penalties.

    The repetition penalty is that of CTRL (Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1) as it is
    used since: it divides positive logits and multiplies negative ones. The other two are OpenAI's: once for each time
    that a token is in the answer, and once if it is.

    Args:
        logits: float32.
        seen: tokens so far.
        penalties: repetition, presence, frequency.
    """
    repetition, presence, frequency = (penalties[:, i, None] for i in range(3))
    repeated = seen.prompt | (seen.answer > 0)
    logits = jnp.where(repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - frequency * seen.answer.astype(jnp.float32)
    return logits - presence * (seen.answer > 0).astype(jnp.float32)


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
