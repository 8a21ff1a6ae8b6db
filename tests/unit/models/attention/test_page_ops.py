"""Whole pages, read, written and copied one at a time as all at once."""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.models.attention import (
    ScoreModifier,
    attend_context,
    extend_context,
    gather_context,
    page_ops,
    paged_attention,
)
from lockstep.models.attention import contiguous_kv as context_module
from lockstep.models.attention import reference as reference_module
from lockstep.models.attention.page_ops import to_pool
from lockstep.placement.device import BYTE, as_numbers
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions, rounded_kv
from tests.sampling_oracle import log_softmax
from tests.unit.engine.models import FAMILIES, mesh_of, mixed_requests, model_on, request

POOL = np.random.default_rng(0).standard_normal((6, 2, 4, 3)).astype(np.float32)


def indices(*values: int) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("read_kv", [page_ops.gather_kv, page_ops.read_kv_page_by_page])
def test_the_pages_of_a_sequence_are_read_in_order_k_and_v_by_head(read_kv: page_ops.ReadKv) -> None:
    page = np.array([[5, 0, 5], [2, 1, 3]])
    k, v = read_kv(jnp.asarray(POOL), indices(*page.flat).reshape(page.shape))
    positions = POOL[page].reshape(2, 3 * 2, 4, 3)  # [sequence, position, head, size]
    np.testing.assert_array_equal(k, positions[:, :, 0::2].swapaxes(1, 2))
    np.testing.assert_array_equal(v, positions[:, :, 1::2].swapaxes(1, 2))


def test_of_rows_that_name_a_page_the_last_one_wins_and_other_pages_stay() -> None:
    kv = np.arange(3 * 2 * 4 * 3, dtype=np.float32).reshape(3, 2, 4, 3)
    got = page_ops.write_pages_one_by_one(jnp.asarray(POOL), indices(1, 4, 1), jnp.asarray(kv))
    expected = POOL.copy()
    expected[4], expected[1] = kv[1], kv[2]
    np.testing.assert_array_equal(got, expected)


def test_what_is_written_has_the_dtype_of_the_pool() -> None:
    pool = jnp.zeros((2, 2, 4, 3), jnp.bfloat16)
    got = page_ops.write_pages_one_by_one(pool, indices(1), jnp.full((1, 2, 4, 3), 1.001, jnp.float32))
    assert got.dtype == jnp.bfloat16 and (np.asarray(got[1], np.float32) == 1.0).all()


def test_pages_are_copied_to_their_targets() -> None:
    got = page_ops.copy_pages_one_by_one(jnp.asarray(POOL), indices(5, 0), indices(2, 3))
    expected = POOL.copy()
    expected[[2, 3]] = POOL[[5, 0]]
    np.testing.assert_array_equal(got, expected)


GAP = 0.5
"""How far log-probabilities may be from those over K and V as they are, in these models of 16 numbers per token."""

KV_HEADS, GROUP, HEAD, PAGE_SIZE, WIDTH, LENGTHS = 2, 3, 8, 4, 6, (24, 5, 14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_to_the_nearest_once(dtype: str) -> None:
    size = 2.0 ** np.arange(-12, 9)[:, None]
    given = jnp.asarray(np.random.default_rng(0).uniform(-1.7, 1.7, (21, 500)) * size, dtype)
    got = jax.jit(lambda kv: to_pool(kv, BYTE))(given)
    assert got.dtype == BYTE
    want = np.asarray(given, np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(as_numbers(got)), want)


def test_what_is_too_large_becomes_the_largest_and_what_overflowed_is_nan() -> None:
    got = to_pool(jnp.array([500.0, -1e30, np.inf, -np.inf, np.nan, 1.0]), BYTE)
    np.testing.assert_array_equal(np.asarray(as_numbers(got), np.float32), [448.0, -448.0, np.nan, np.nan, np.nan, 1.0])


def test_another_dtype_is_a_cast() -> None:
    got = to_pool(jnp.array([1.001, 1e30, np.inf]), jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(got), np.array([1.001, 1e30, np.inf], ml_dtypes.bfloat16))


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
@pytest.mark.parametrize(
    ("dtype", "atol"), [("float32", 2e-6), ("bfloat16", 3e-2), pytest.param("float16", 4e-3, marks=pytest.mark.slow)]
)
def test_attention_over_what_was_rounded(
    chunk: int, modifier: ScoreModifier, dtype: str, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "CONTEXT_CHUNK", chunk)
    monkeypatch.setattr(reference_module, "CHUNK", chunk)
    rng, queries = np.random.default_rng(1), 3
    q = np.asarray(jnp.asarray(rng.standard_normal((3, queries, KV_HEADS, GROUP, HEAD)), dtype), np.float32)
    kv = rng.standard_normal((3, WIDTH * PAGE_SIZE, 2 * KV_HEADS, HEAD)).astype(ml_dtypes.float8_e4m3fn)
    k, v = kv.astype(np.float32)[:, :, 0::2], kv.astype(np.float32)[:, :, 1::2]
    table = rng.permutation(np.arange(1, 3 * WIDTH + 1)).reshape(3, WIDTH).astype(np.int32)
    # Pages as their last owner left them: any bytes, NaN among them.
    pool = rng.integers(0, 256, (3 * WIDTH + 1, PAGE_SIZE, 2 * KV_HEADS, HEAD)).astype(np.uint8)
    pool[0] = nan = 0x7F
    for sequence, length in enumerate(LENGTHS):
        for at in range(WIDTH * PAGE_SIZE):
            one = kv.view(np.uint8)[sequence, at] if at < length else nan
            pool[table[sequence, at // PAGE_SIZE], at % PAGE_SIZE] = one
    start = np.array(LENGTHS, np.int32) - queries
    want = plain(q, k, v, start, modifier)

    given = jnp.asarray(q, dtype)
    got = jax.jit(paged_attention, static_argnums=4)(given, pool, table, start, modifier)
    assert got.dtype == given.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=atol)

    def decode(pool: jax.Array, q: jax.Array, last: jax.Array) -> jax.Array:
        context = gather_context(pool, jnp.asarray(table), last, 1)
        assert context.k.dtype == BYTE, "half the bytes of bfloat16 here too"
        own = jnp.asarray(kv)[jnp.arange(3), last].astype(dtype)
        context = extend_context(context, jnp.int32(0), own[:, None], last[:, None])
        return attend_context(q, context, jnp.int32(0), last, modifier)

    last = np.array(LENGTHS, np.int32) - 1
    stepped = jax.jit(decode)(pool, given[:, -1:], last)
    np.testing.assert_allclose(np.asarray(stepped, np.float32), want[:, -1:], rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "layout", "options"),
    [
        ("qwen3", "1,2,2", {"tensor": 2}, {"page_size": 8, "max_prefill_size": 16, "max_steps_per_launch": 5}),
        pytest.param("llama3", "1,1,1", {"tensor": 1}, {"max_seqs": 1, "page_size": 16}, marks=pytest.mark.nightly),
        pytest.param("gemma", "1,2,2", "training", {"page_size": 32, "share_prefixes": False}, marks=pytest.mark.slow),
    ],
)
def test_tokens_depend_on_the_request_alone(family: str, mesh: str, layout: Any, options: dict[str, Any]) -> None:
    model, requests = model_on(mesh, FAMILIES[family]), [*mixed_requests(), request(7, 34, 4, prompt_logprobs=True)]
    engine = Engine(EngineConfig(layout=layout, kv_cache_dtype="fp8", **options), mesh_of(mesh))
    got = engine.generate(model, requests)
    assert ("copy_pages" in engine.programs) == options.get(
        "share_prefixes", True
    ) and "prompt_logprobs" in engine.programs
    want = oracle_completions(model, requests, fp8_cache=True)
    ties, worst = assert_same_tokens(want, got), assert_same_logprobs(want, got)

    one, alone = requests[-1], model_on("1,1,1", FAMILIES[family])
    with rounded_kv():
        logits = alone(hax.named(np.asarray([one.prompt_tokens]), ("batch", "position"))).array
    rows = [log_softmax(np.asarray(row, np.float32)) for row in logits[0]][:-1]
    own = [float(row[token]) for row, token in zip(rows, one.prompt_tokens[1:], strict=True)]
    np.testing.assert_allclose(np.array(got[-1].prompt_logprobs[1:], float), own, rtol=0, atol=1e-5)

    # What rounding costs, and that it is there at all: the first tokens, for which both have seen the same.
    exact = oracle_completions(model, requests)
    gaps = [abs(e.logprobs[0] - c.logprobs[0]) for e, c in zip(exact, got, strict=True) if e.tokens[0] == c.tokens[0]]
    print(f"{ties} ties; log-probabilities differ by {worst:.1e}, from those of unrounded K and V by {max(gaps):.1e}")
    assert 1e-4 < max(gaps) < GAP
