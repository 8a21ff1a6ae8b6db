"""All scores at once, against a loop over queries in float64; blocks of queries, against all scores at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models.attention.training.causal import CausalAttention, HeadArrays, blockwise_attention, dense_attention
from tests.unit.models.attention.training.cases import CASES, SINKS, arrays, with_gradients


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
    attended = jax.jit(dense_attention, static_argnums=1)(HeadArrays(*inputs), attention)
    np.testing.assert_allclose(attended, in_numpy(*inputs, attention), atol=2e-6)


@pytest.mark.parametrize("case", ["plain", "all"])
def test_blocks_change_neither_the_result_nor_a_gradient(case):
    attention, packed = CASES[case]
    sinks = (SINKS,) if case == "all" else ()
    inputs = (*arrays(20, packed=packed), *sinks)  # the last of three blocks of 8 begins inside the second
    found = with_gradients(blockwise_attention, inputs, attention, query_block=8)
    for ours, theirs in zip(found, with_gradients(dense_attention, inputs, attention), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_gradients_of_keys_are_summed_in_float32():
    inputs = arrays(256)
    attention = CausalAttention(scale=0.3)
    half = (*(x.astype(jnp.bfloat16) for x in inputs[:3]), None)
    exact = with_gradients(dense_attention, inputs, attention)
    at_once = with_gradients(dense_attention, half, attention)
    found = with_gradients(blockwise_attention, half, attention, query_block=4)
    for ours, theirs, true in zip(found[2:], at_once[2:], exact[2:], strict=True):
        assert ours.dtype == jnp.bfloat16
        assert np.abs(ours - true).mean() < 1.2 * np.abs(theirs - true).mean()


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_with_its_square():
    attention = CausalAttention(scale=0.3)

    def temporaries(function, length, **options):
        inputs = arrays(length, batch=1, kv_heads=1, group=1, head=8)

        def total(*qkv):
            return jnp.sum(function(HeadArrays(*qkv), attention, **options))

        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*inputs[:3]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(blockwise_attention, 2048, query_block=128) < 2.5 * temporaries(
        blockwise_attention, 1024, query_block=128
    )
    assert temporaries(blockwise_attention, 2048, query_block=128) < temporaries(dense_attention, 2048) / 4
