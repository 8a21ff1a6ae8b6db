"""Attention with the same bits in prefill, decode and training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models.attention import (
    ExactAttention,
    Heads,
    ScoreModifier,
    attend_documents,
    attend_exact,
    contiguous_blocks,
    paged_attention,
)

RNG = np.random.default_rng(0)
WINDOW = ScoreModifier(soft_cap=2.0, window=70)


def normal(*shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


SINKS = normal(2, 3)


def attended(q, position, k, v, sinks):
    return attend_exact(q, position, *contiguous_blocks(k, v), WINDOW, sinks)


@pytest.mark.parametrize(
    ("dtype", "sinks"), [("bfloat16", None), pytest.param("float32", None, marks=pytest.mark.slow), ("float32", SINKS)]
)
def test_a_query_has_the_same_bits_alone_and_beside_others_and_before_a_longer_context(dtype, sinks):
    q, k, v = (normal(*shape, dtype=dtype) for shape in ((2, 12, 2, 3, 8), (2, 2, 160, 8), (2, 2, 160, 8)))
    position = jnp.asarray([range(100, 112), range(140, 152)])
    whole = jax.jit(attended)(q, position, k, v, sinks)
    alone = jax.jit(attended)(q[1:, 5:6], position[1:, 5:6], k[1:], v[1:], sinks)
    np.testing.assert_array_equal(alone[0, 0], whole[1, 5])
    short = jax.jit(attended)(q[:1, 3:8], position[:1, 3:8], k[:1, :, :112], v[:1, :, :112], sinks)
    np.testing.assert_array_equal(short[0], whole[0, 3:8])


@pytest.mark.parametrize(
    "head", [64, *(pytest.param(head, marks=pytest.mark.slow) for head in (16, 80, 96, 128, 256, 320))]
)
def test_a_query_of_float32_has_the_same_bits_in_a_tile_of_any_number_of_rows(head):
    q, k, v = normal(2, 70, 2, 3, head), normal(2, 2, 200, head), normal(2, 2, 200, head)
    position = jnp.stack([jnp.arange(130, 200), jnp.arange(70)])
    whole = np.asarray(jax.jit(attended)(q, position, k, v, None))
    for few in (1, 20):  # of 3 heads each: in tiles of 16 and 64 rows, beside two of 112
        part = jax.jit(attended)(q[1:, 5 : 5 + few], position[1:, 5 : 5 + few], k[1:], v[1:], None)
        np.testing.assert_array_equal(part[0], whole[1, 5 : 5 + few])


def test_a_document_of_a_packed_row_has_the_bits_that_it_has_alone():
    length, cuts = 300, (0, 5, 37, 290, 300)
    shapes = (1, length, 2, 3, 8), (1, 2, length, 8), (1, 2, length, 8)
    q, k, v = (normal(*shape, dtype="bfloat16") for shape in shapes)
    first = np.repeat(cuts[:-1], np.diff(cuts))[None]
    packed = jax.jit(functools.partial(attend_documents, modifier=WINDOW, sinks=SINKS))(
        *(jnp.concatenate([each, each[:, ::-1]]) for each in (q, k, v)), jnp.concatenate([first, 0 * first])
    )
    alone, place = jax.jit(attended), jnp.arange(length)[None]
    for begin, end in zip(cuts, cuts[1:], strict=False):
        moved = [jnp.roll(each, -begin, axis) for each, axis in ((q, 1), (k, 2), (v, 2))]
        np.testing.assert_array_equal(packed[0, begin:end], alone(moved[0], place, *moved[1:], SINKS)[0, : end - begin])


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_it_is_attention(sinks):
    pool, table = normal(12, 16, 4, 8), jnp.asarray([[3, 7, 1, 9, 0, 2, 4, 5, 6]])
    q, start = normal(1, 16, 2, 3, 8), jnp.asarray([120])
    attention = ExactAttention(heads=Heads(kv_heads=2, group=3, head_size=8, modifier=WINDOW), page_size=16)
    rows = attention.begin_prefill(start, table, jnp.ones(1, bool))
    prefill = functools.partial(attention.prefill, layer=jnp.int32(0), first_page=jnp.int32(0), rows=rows, sinks=sinks)
    want = paged_attention(q, pool, table, start, WINDOW, sinks=sinks)
    np.testing.assert_allclose(jax.jit(prefill)(q, pool), want, atol=1e-5)


def test_a_page_that_does_not_divide_a_block_is_refused():
    with pytest.raises(ConfigError, match="page_size is 24; with numerics: exact it must divide 128"):
        ExactAttention(heads=Heads(kv_heads=1, group=1, head_size=8), page_size=24)
