"""Where a short list settles what top-k and top-p keep; that it does so rightly is in `test_threshold`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

    def settled(scores: np.ndarray, k: int, p: float) -> bool:
        return bool(find(scores, np.array([k], np.int32), np.array([p], np.float32))[0])

    assert settled(peaked, 0, 1.0) and settled(peaked, VOCAB, 1.0) and settled(peaked, SIZE, 1.0)
    assert settled(peaked, 0, 0.9) and settled(peaked, SIZE, 0.999)
    assert not settled(peaked, SIZE + 1, 1.0) and not settled(peaked, SIZE + 1, 0.5)
    assert settled(flat, SIZE, 0.9) and not settled(flat, 0, 0.9)
    assert settled(flat, 0, SIZE / VOCAB) and not settled(flat, 0, (SIZE + 1) / VOCAB)
    assert settled(flat[:, :SIZE], 0, 0.999), "the list is the vocabulary"
