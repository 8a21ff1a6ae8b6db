"""Where a short list decides what top-k and top-p keep; that it does so rightly is in `test_threshold`."""

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

    def decides(scores: np.ndarray, k: int, p: float) -> bool:
        return bool(find(scores, np.array([k], np.int32), np.array([p], np.float32))[0])

    assert decides(peaked, 0, 1.0) and decides(peaked, VOCAB, 1.0) and decides(peaked, SIZE, 1.0)
    assert decides(peaked, 0, 0.9) and decides(peaked, SIZE, 0.999)
    assert not decides(peaked, SIZE + 1, 1.0) and not decides(peaked, SIZE + 1, 0.5)
    assert decides(flat, SIZE, 0.9) and not decides(flat, 0, 0.9)
    assert decides(flat, 0, SIZE / VOCAB) and not decides(flat, 0, (SIZE + 1) / VOCAB)
    assert decides(flat[:, :SIZE], 0, 0.999), "the list is the vocabulary"
