"""All scores at once, against a loop over queries in float64."""

import jax
import numpy as np
import pytest

from lockstep.models.attention.training.causal import dense_attention
from tests.unit.models.attention.training.cases import CASES, arrays


def in_numpy(q, k, v, segments, attention):
    out = np.zeros(q.shape)
    for row, query, head, member in np.ndindex(*q.shape[:4]):
        first = 0 if attention.sliding_window is None else max(0, query + 1 - attention.sliding_window)
        seen = [
            key for key in range(first, query + 1) if segments is None or segments[row, key] == segments[row, query]
        ]
        scores = attention.scale * k[row, seen, head].astype(np.float64) @ q[row, query, head, member]
        if attention.soft_cap is not None:
            scores = attention.soft_cap * np.tanh(scores / attention.soft_cap)
        weights = np.exp(scores - scores.max())
        out[row, query, head, member] = weights / weights.sum() @ v[row, seen, head]
    return out


@pytest.mark.parametrize("case", CASES)
def test_dense_attention_is_the_loop(case):
    attention, packed = CASES[case]
    inputs = arrays(20, packed=packed)
    found = jax.jit(dense_attention, static_argnums=4)(*inputs, attention)
    np.testing.assert_allclose(found, in_numpy(*inputs, attention), atol=2e-6)
