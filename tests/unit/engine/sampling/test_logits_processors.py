"""Penalties, bias, allowed tokens and early stops, on the whole vocabulary and on halves of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine.sampling.logits_processors import (
    TokenCounts,
    add_token,
    allowed,
    biases,
    count_tokens,
    penalise,
    rule_out_stops,
)

VOCAB = 6
PARTS = pytest.mark.parametrize("parts", [1, 2])


def by_part(parts: int, function: Any) -> np.ndarray:
    """What ``function(first, size)`` gives for each part of the vocabulary, side by side."""
    size = VOCAB // parts
    jitted = jax.jit(function, static_argnums=1)
    return np.concatenate([np.asarray(jitted(part * size, size)) for part in range(parts)], axis=1)


def ints(values: Any) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


HISTORY, PROMPT_LENGTH = ints([[1, 1, 4, 4, 0], [5, 2, -1, -1, -1]]), ints([2, 2])


@PARTS
def test_prompt_and_answer_are_counted_apart(parts: int) -> None:
    prompt = by_part(parts, lambda first, size: count_tokens(HISTORY, PROMPT_LENGTH, first, size).prompt)
    answer = by_part(parts, lambda first, size: count_tokens(HISTORY, PROMPT_LENGTH, first, size).answer)
    assert prompt.astype(int).tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1]]
    assert answer.tolist() == [[1, 0, 0, 0, 2, 0], [0] * 6]


@PARTS
def test_a_token_is_counted_in_active_slots_alone(parts: int) -> None:
    def counted(first: int, size: int) -> Any:
        counts = count_tokens(HISTORY, PROMPT_LENGTH, first, size)
        return add_token(counts, ints([4, 4]), jnp.asarray([True, False]), first).answer

    assert by_part(parts, counted).tolist() == [[1, 0, 0, 0, 3, 0], [0] * 6]


def penalised(repetition: float, presence: float, frequency: float) -> list[float]:
    """What becomes of logits 2 and -2: a token of the prompt, one that is twice in the answer, one that is nowhere."""
    logits = jnp.asarray([[2.0, -2.0, 2.0, -2.0, 2.0, -2.0]])
    prompt = jnp.asarray([[True, True, False, False, False, False]])
    counts = TokenCounts(prompt=prompt, answer=ints([[0, 0, 2, 2, 0, 0]]))
    return np.asarray(jax.jit(penalise)(logits, counts, jnp.asarray([[repetition, presence, frequency]])))[0].tolist()


def test_the_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    assert penalised(4.0, 0.0, 0.0) == [0.5, -8.0, 0.5, -8.0, 2.0, -2.0]


def test_the_presence_penalty_is_subtracted_once_from_what_is_in_the_answer() -> None:
    assert penalised(1.0, 0.5, 0.0) == [2.0, -2.0, 1.5, -2.5, 2.0, -2.0]


def test_the_frequency_penalty_is_subtracted_for_each_time() -> None:
    assert penalised(1.0, 0.0, 0.5) == [2.0, -2.0, 1.0, -3.0, 2.0, -2.0]


@PARTS
def test_a_bias_reaches_its_token_and_no_other(parts: int) -> None:
    found = by_part(parts, lambda first, size: biases(ints([[4, 1, -1]]), jnp.asarray([[2.0, -3.0, 9.0]]), first, size))
    assert found.tolist() == [[0.0, -3.0, 0.0, 0.0, 2.0, 0.0]]


@PARTS
def test_a_slot_that_lists_tokens_allows_those_and_another_allows_all(parts: int) -> None:
    found = by_part(parts, lambda first, size: allowed(ints([[5, 0, -1], [-1, -1, -1]]), first, size))
    assert found.astype(int).tolist() == [[1, 0, 0, 0, 0, 1], [1] * 6]


@PARTS
def test_stop_tokens_are_ruled_out_where_it_is_too_early(parts: int) -> None:
    def ruled_out(first: int, size: int) -> Any:
        stops, early = ints([[1, 5], [1, 5]]), jnp.asarray([True, False])
        return rule_out_stops(jnp.zeros((2, size)), stops, early, first)

    assert by_part(parts, ruled_out).tolist() == [[0.0, -np.inf, 0.0, 0.0, 0.0, -np.inf], [0.0] * 6]
