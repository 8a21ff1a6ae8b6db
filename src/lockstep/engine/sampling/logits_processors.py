"""Logits processors: penalties, bias, allowed tokens and stop tokens that it is too early for, before temperature.

They are in the order in which the sampler applies them. Each works on this device's part of the vocabulary, whose
first token id is ``first``.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TokenCounts(NamedTuple):
    """The tokens that each slot has so far, of this device's part of the vocabulary."""

    prompt: Bool[Array, "slot local_vocab"]
    """Whether the token is in the prompt."""
    answer: Int[Array, "slot local_vocab"]
    """Occurrences of the token in the answer."""


def count_tokens(
    history: Int[Array, "slot length"], prompt_length: Int[Array, " slot"], first: Array | int, size: int
) -> TokenCounts:
    """Count the tokens that each slot has when a launch starts.

    Args:
        history: The token ids of prompt and answer, padded with -1.
    """
    slots, length = history.shape
    rows, indices = jnp.arange(slots)[:, None], local_ids(history, first, size)
    in_answer = jnp.arange(length) >= prompt_length[:, None]
    prompt = jnp.zeros((slots, size), bool).at[rows, jnp.where(in_answer, size, indices)].set(True, mode="drop")
    answer = jnp.zeros((slots, size), jnp.int32).at[rows, jnp.where(in_answer, indices, size)].add(1, mode="drop")
    return TokenCounts(prompt, answer)


def add_token(
    counts: TokenCounts, token: Int[Array, " slot"], active: Bool[Array, " slot"], first: Array | int
) -> TokenCounts:
    """Count one more token of each active slot."""
    slots, size = counts.answer.shape
    indices = jnp.where(active, local_ids(token, first, size), size)
    return counts._replace(answer=counts.answer.at[jnp.arange(slots), indices].add(1, mode="drop"))


def penalise(
    logits: Float[Array, "slot local_vocab"], counts: TokenCounts, penalties: Float[Array, "slot 3"]
) -> Float[Array, "slot local_vocab"]:
    """Apply the repetition, frequency and presence penalties.

    The repetition penalty is that of CTRL (Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1) as it is
    used since: it divides positive logits and multiplies negative ones. The other two are OpenAI's
    (https://platform.openai.com/docs/api-reference/completions): the frequency penalty is subtracted once for each time
    that a token is in the answer, the presence penalty once if it is there.

    Args:
        penalties: The repetition, presence and frequency penalty of each slot.
    """
    repetition, presence, frequency = (penalties[:, i, None] for i in range(3))
    repeated = counts.prompt | (counts.answer > 0)
    logits = jnp.where(repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - frequency * counts.answer.astype(jnp.float32)
    return logits - presence * (counts.answer > 0).astype(jnp.float32)


def biases(
    bias_ids: Int[Array, "slot bias_ids"], bias: Float[Array, "slot bias_ids"], first: Array | int, size: int
) -> Float[Array, "slot local_vocab"]:
    """Return what is added to each logit of this device's part of the vocabulary.

    Args:
        bias_ids: The token ids of the biases, padded with -1; no id twice.
        bias: The bias of each of these tokens.
    """
    rows = jnp.arange(len(bias_ids))[:, None]
    return jnp.zeros((len(bias_ids), size)).at[rows, local_ids(bias_ids, first, size)].add(bias, mode="drop")


def allowed(
    allowed_ids: Int[Array, "slot allowed_ids"], first: Array | int, size: int
) -> Bool[Array, "slot local_vocab"]:
    """Return which tokens of this device's part may be sampled: those listed, or all in a slot that lists none.

    Args:
        allowed_ids: The allowed token ids, padded with -1.
    """
    rows, indices = jnp.arange(len(allowed_ids))[:, None], local_ids(allowed_ids, first, size)
    listed = jnp.zeros((len(allowed_ids), size), bool).at[rows, indices].set(True, mode="drop")
    return listed | ~jnp.any(allowed_ids >= 0, axis=1, keepdims=True)


def rule_out_stops(
    logits: Float[Array, "slot local_vocab"],
    stop_ids: Int[Array, "slot stop_ids"],
    early: Bool[Array, " slot"],
    first: Array | int,
) -> Float[Array, "slot local_vocab"]:
    """Set the logits of stop tokens to -inf in slots where it is too early to stop.

    Args:
        stop_ids: The stop tokens of each slot, padded with -1.
        early: Whether the slot has fewer than ``min_tokens`` tokens.
    """
    size = logits.shape[1]
    indices = jnp.where(early[:, None], local_ids(stop_ids, first, size), size)
    return logits.at[jnp.arange(len(logits))[:, None], indices].set(-jnp.inf, mode="drop")


def local_ids(ids: Int[Array, "..."], first: Array | int, size: int) -> Int[Array, "..."]:
    """Return the indices of token ids in this device's part; ``size``, which a scatter drops, for ids outside it."""
    return jnp.where((ids >= first) & (ids < first + size), ids - first, size)
