"""Repetition, frequency and presence penalties: the tokens that a sequence has, counted on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Seen(NamedTuple):
    """What each slot has of this device's part of the vocabulary."""

    prompt: Bool[Array, "slot local_vocab"]
    answer: Int[Array, "slot local_vocab"]
    """How often."""


def local_ids(ids: Int[Array, "..."], first: Array | int, size: int) -> Int[Array, "..."]:
    """Places of token ids in this device's part; ``size``, which a scatter drops, where they are not in it."""
    return jnp.where((ids >= first) & (ids < first + size), ids - first, size)


def seen_so_far(
    history: Int[Array, "slot length"], prompt_length: Int[Array, " slot"], first: Array | int, size: int
) -> Seen:
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
    return Seen(prompt, answer)


def add_token(seen: Seen, token: Int[Array, " slot"], active: Bool[Array, " slot"], first: Array | int) -> Seen:
    """Counts one more token of each active slot."""
    slots, size = seen.answer.shape
    places = jnp.where(active, local_ids(token, first, size), size)
    return seen._replace(answer=seen.answer.at[jnp.arange(slots), places].add(1, mode="drop"))


def penalise(
    logits: Float[Array, "slot local_vocab"], seen: Seen, penalties: Float[Array, "slot 3"]
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
