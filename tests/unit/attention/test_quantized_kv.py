"""K and V in 8 bits: the numbers themselves, and attention over them, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.attention import (
    Int8Kv,
    ScoreModifier,
    attend_context,
    extend_context,
    gather_context,
    paged_attention,
)
from lockstep.attention import contiguous_kv as context_module
from lockstep.attention import reference as reference_module

INT8 = Int8Kv()
KV_HEADS, GROUP, HEAD, PAGE_SIZE, WIDTH, LENGTHS = 2, 3, 8, 4, 6, (24, 5, 14)


def in_numpy(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers and scales, float32: the scale is a 127th of the largest number, halves go to the even number."""
    scale = np.abs(heads.astype(np.float32)).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    return np.rint(heads.astype(np.float32) / np.where(scale == 0, np.float32(1), scale)), scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 3e4])
def test_numbers_and_scales(dtype: str, size: float) -> None:
    heads = np.random.default_rng(0).standard_normal((5, 7, HEAD)).clip(-2, 2) * size
    heads[0, 0] = 0
    given = jnp.asarray(heads, dtype)
    packed = jax.jit(INT8.pack)(given)
    assert packed.dtype == jnp.int8 and packed.shape == (5, 7, HEAD + 4)
    numbers, scale = INT8.unpack(packed)
    want_numbers, want_scale = in_numpy(np.asarray(given))
    np.testing.assert_array_equal(numbers, want_numbers)
    np.testing.assert_array_equal(scale, want_scale[..., 0])
    error = np.abs(np.asarray(numbers) * want_scale - np.asarray(given, np.float32))
    assert (error <= 0.5001 * want_scale).all() and (error[0, 0] == 0).all()


@pytest.mark.parametrize("sick", [np.nan, np.inf, -np.inf])
def test_a_head_that_overflowed_is_not_finite_and_its_neighbour_is_well(sick: float) -> None:
    heads = np.ones((2, HEAD), np.float32)
    heads[0, 3] = sick
    numbers, scale = INT8.unpack(INT8.pack(jnp.asarray(heads)))
    assert np.isfinite(scale[1]) and not np.isfinite(scale[0])
    np.testing.assert_array_equal(np.asarray(numbers[1]) * np.asarray(scale[1]), heads[1])


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: np.ndarray, modifier: ScoreModifier) -> np.ndarray:
    """Attention one query at a time, in float64."""
    out = np.zeros(q.shape)
    for s, i, h, g in np.ndindex(q.shape[:-1]):
        last = start[s] + i + 1
        seen = slice(0 if modifier.window is None else max(0, last - modifier.window), last)
        scores = k[s, seen, h].astype(np.float64) @ q[s, i, h, g] / np.sqrt(HEAD)
        scores = scores if modifier.soft_cap is None else modifier.soft_cap * np.tanh(scores / modifier.soft_cap)
        weights = np.exp(scores - scores.max())
        out[s, i, h, g] = weights / weights.sum() @ v[s, seen, h]
    return out


@pytest.mark.parametrize("chunk", [64, 8])
@pytest.mark.parametrize("modifier", [ScoreModifier(), ScoreModifier(soft_cap=2.0, window=5)])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("bfloat16", 3e-2), ("float16", 4e-3)])
def test_attention_over_what_was_rounded(
    chunk: int, modifier: ScoreModifier, dtype: str, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "CONTEXT_CHUNK", chunk)
    monkeypatch.setattr(reference_module, "CHUNK", chunk)
    rng, queries = np.random.default_rng(1), 3
    q = np.asarray(jnp.asarray(rng.standard_normal((3, queries, KV_HEADS, GROUP, HEAD)), dtype), np.float32)
    kv = np.asarray(jnp.asarray(rng.standard_normal((3, WIDTH * PAGE_SIZE, 2 * KV_HEADS, HEAD)), dtype), np.float32)
    numbers, scale = in_numpy(kv)
    k, v = (numbers * scale)[:, :, 0::2], (numbers * scale)[:, :, 1::2]
    table = rng.permutation(np.arange(1, 3 * WIDTH + 1)).reshape(3, WIDTH).astype(np.int32)
    # Pages as their last owner left them: any bytes, among them scales that are NaN and infinite.
    pool = rng.integers(-128, 128, (3 * WIDTH + 1, PAGE_SIZE, 2 * KV_HEADS, HEAD + 4)).astype(np.int8)
    pool[0, ..., -4:] = np.frombuffer(np.float32(np.nan).tobytes(), np.int8)
    packed = np.array(INT8.pack(jnp.asarray(kv)))
    for sequence, length in enumerate(LENGTHS):
        for at in range(length):
            pool[table[sequence, at // PAGE_SIZE], at % PAGE_SIZE] = packed[sequence, at]
        for at in range(length, WIDTH * PAGE_SIZE):
            sick = np.float32([np.nan, np.inf][at % 2])
            pool[table[sequence, at // PAGE_SIZE], at % PAGE_SIZE, :, -4:] = np.frombuffer(sick.tobytes(), np.int8)
    start = np.array(LENGTHS, np.int32) - queries
    want = plain(q, k, v, start, modifier)

    given = jnp.asarray(q, dtype)
    got = jax.jit(paged_attention, static_argnums=(4, 5))(given, pool, table, start, modifier, INT8)
    assert got.dtype == given.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=atol)

    def decode(pool: jax.Array, q: jax.Array, last: jax.Array) -> jax.Array:
        context = gather_context(pool, jnp.asarray(table), last, 1)
        assert context.k.dtype == jnp.int8, "half the bytes of bfloat16 here too"
        own = jnp.asarray(packed)[jnp.arange(3), last]
        return attend_context(q, extend_context(context, jnp.int32(0), own, last), jnp.int32(0), last, modifier, INT8)

    last = np.array(LENGTHS, np.int32) - 1
    stepped = jax.jit(decode)(pool, given[:, -1], last)
    np.testing.assert_allclose(np.asarray(stepped, np.float32), want[:, -1], rtol=0, atol=atol)
