"""Where a short list decides what top-k and top-p keep; that it does so rightly is in `test_threshold`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine.sampling.filters import Candidates
from lockstep.engine.sampling.shortlist import SIZE, Shortlist

VOCAB = 3 * SIZE


def test_a_shortlist_says_where_it_ends_too_early() -> None:
    flat = np.zeros((1, VOCAB), np.float32)
    peaked = 4 * np.random.default_rng(0).standard_normal((1, VOCAB)).astype(np.float32)

    @jax.jit
    def find(scores: Any, k: Any, p: Any) -> Any:
        candidates = Candidates.of(scores, jnp.arange(scores.shape[1]))
        return Shortlist.of(candidates).threshold(candidates, k, p)[1]

    def decides(scores: np.ndarray, k: int, p: float) -> bool:
        return bool(find(scores, np.array([k], np.int32), np.array([p], np.float32))[0])

    assert decides(peaked, 0, 1.0) and decides(peaked, VOCAB, 1.0) and decides(peaked, SIZE, 1.0)
    assert decides(peaked, 0, 0.9) and decides(peaked, SIZE, 0.999)
    assert not decides(peaked, SIZE + 1, 1.0) and not decides(peaked, SIZE + 1, 0.5)
    assert decides(flat, SIZE, 0.9) and not decides(flat, 0, 0.9)
    assert decides(flat, 0, SIZE / VOCAB) and not decides(flat, 0, (SIZE + 1) / VOCAB)
    assert decides(flat[:, :SIZE], 0, 0.999), "the list is the vocabulary"


@pytest.mark.parametrize("vocab", [100, 2000, 5001, 32000])
def test_a_list_is_the_head_of_the_whole_order(vocab):
    """Few different scores, so that equal ones are on both sides of every border; -0 is 0; some may not be drawn."""
    draw = np.random.default_rng(vocab)
    scores = np.round(draw.normal(size=(3, vocab)) * 3).astype(np.float32) / 3
    scores[1] = np.where(draw.random(vocab) < 0.99, -np.inf, -0.0)
    scores[2] = 0.0
    found = jax.jit(lambda each: Shortlist.of(Candidates.of(each, jnp.arange(vocab))))(scores)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :SIZE]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, order, axis=1))
