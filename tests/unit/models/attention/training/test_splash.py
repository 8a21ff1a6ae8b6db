"""jax's TPU kernel, interpreted on the CPU, against all scores at once."""

import functools

import numpy as np
import pytest

from lockstep.models.attention.training.causal import CausalAttention, dense_attention
from lockstep.models.attention.training.splash import splash_attention
from tests.unit.models.attention.training.cases import SINKS, arrays, with_gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "packed"),
    [
        pytest.param(CausalAttention(scale=0.3), False, marks=pytest.mark.slow),
        (CausalAttention(scale=0.7, sliding_window=150, soft_cap=1.5), True),
    ],
    ids=["plain", "window, soft cap, documents, sinks"],
)
def test_the_kernel_is_all_scores_at_once(attention, packed):
    """300 positions are padded to 3 blocks of 128; 3 queries share a key/value head."""
    inputs = (*arrays(300, kv_heads=1, head=8, packed=packed), *([SINKS[:1]] if packed else []))
    found = with_gradients(functools.partial(splash_attention, interpret=True), inputs, attention)
    for ours, theirs in zip(found, with_gradients(dense_attention, inputs, attention), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)
