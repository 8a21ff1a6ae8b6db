"""Softmax attention, chunk by chunk and all at once, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models.attention import ScoreModifier
from lockstep.models.attention.softmax import attend

LENGTH, HEAD = 12, 4
POSITION = np.array([[0, 11], [5, 6]], np.int32)
_draw = np.random.default_rng(0).standard_normal
Q = _draw((2, 1, 2, HEAD)).astype(np.float32)
K, V = _draw((2, 2, 1, LENGTH, HEAD)).astype(np.float32)


SINKS = np.array([[0.7, -1.0]], np.float32)


def plain(modifier: ScoreModifier, sinks: np.ndarray | None = None) -> np.ndarray:
    """One query at a time, in float64."""
    out = np.zeros(Q.shape)
    for s, i in np.ndindex(POSITION.shape):
        last = POSITION[s, i] + 1
        seen = slice(0 if modifier.window is None else max(0, last - modifier.window), last)
        scores = K[s, 0, seen].astype(np.float64) @ Q[s, 0, i] / np.sqrt(HEAD)
        if modifier.soft_cap is not None:
            scores = modifier.soft_cap * np.tanh(scores / modifier.soft_cap)
        weights = np.exp(scores)
        nothing = 0.0 if sinks is None else np.exp(sinks[0, i])
        out[s, 0, i] = weights / (weights.sum() + nothing) @ V[s, 0, seen]
    return out


def in_chunks(
    size: int, modifier: ScoreModifier, k: np.ndarray = K, v: np.ndarray = V, sinks: np.ndarray | None = None
) -> np.ndarray:
    def read(index: jnp.ndarray | int) -> tuple[jnp.ndarray, jnp.ndarray]:
        start = index * size
        at = start + jnp.arange(size)
        return jnp.asarray(k)[:, :, at], jnp.asarray(v)[:, :, at]

    whole = jax.jit(lambda q, position: attend(q, position, read, LENGTH // size, size, modifier, sinks))
    return np.asarray(whole(Q, POSITION))


@pytest.mark.parametrize(
    ("size", "modifier"),
    [
        (12, ScoreModifier()),
        (4, ScoreModifier()),
        (12, ScoreModifier(soft_cap=0.5, window=7)),
        (4, ScoreModifier(soft_cap=0.5)),
        (4, ScoreModifier(window=2)),
    ],
)
def test_it_is_plain_attention_in_chunks_of_any_size(size: int, modifier: ScoreModifier) -> None:
    np.testing.assert_allclose(in_chunks(size, modifier), plain(modifier), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [12, 4])
def test_sinks_take_a_part_of_the_softmax(size: int) -> None:
    modifier, sinks = ScoreModifier(window=7), jnp.asarray(SINKS)
    np.testing.assert_allclose(in_chunks(size, modifier, sinks=sinks), plain(modifier, SINKS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [12, 4])
def test_a_window_of_one_is_the_value_at_the_queries_own_position(size: int) -> None:
    own = np.stack([V[s, 0, POSITION[s]] for s in range(2)])[:, None]
    np.testing.assert_allclose(in_chunks(size, ScoreModifier(window=1)), own, rtol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    assert np.isfinite(in_chunks(4, ScoreModifier(), k=K * 1e4)).all()
