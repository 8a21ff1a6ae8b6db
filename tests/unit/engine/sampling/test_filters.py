"""Top-k, top-p and min-p: what they keep, on one device and on several, and the distribution that comes out."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from lockstep.callback import InferenceEvalConfig
from lockstep.engine.sampling.filters import FILTERS as ALL_FILTERS
from lockstep.engine.sampling.filters import (
    Candidates,
    Filter,
    check_named_filters,
    keep_all,
    mass_of,
    sum_limbs,
    top_p,
)
from lockstep.engine.sampling.sampler import Sampled, SamplingState, active_features, sample
from lockstep.engine.sampling.threshold import SIZE
from lockstep.engine.schedule import SamplingBatch, sampling_sizes
from lockstep.engine.schedule.sequence import Sequence
from lockstep.errors import ConfigError
from lockstep.placement.decode_mesh import make_decode_mesh
from lockstep.placement.device.program import without_source_locations
from lockstep.types import Request, SamplingParams
from tests.sampling_oracle import SLACK, kept, kept_within, shares, step_of
from tests.unit.engine.models import mesh_of
from tests.unit.engine.schedule.test_scheduler import capacity_of

P = jax.sharding.PartitionSpec
VOCAB, ROWS = 21, 256  # each shape is compiled


def state_of(params: list[SamplingParams], words: np.ndarray) -> SamplingState:
    return SamplingState(
        words.astype(np.uint32),
        np.array([p.temperature for p in params], np.float32),
        {
            "top_k": np.array([p.top_k or 0 for p in params], np.int32),
            "top_p": np.array([p.top_p for p in params], np.float32),
            "min_p": np.array([math.log(p.min_p) if p.min_p else -math.inf for p in params], np.float32),
            **{
                name: np.array([p.filter_values().get(name, math.nan) for p in params], np.float32)
                for name in sorted({name for p in params for name in p.filter_values()})
            },
        },
    )


@functools.cache
def sampler(tensor: int) -> Any:
    """`sample` as the devices of a replica run it; a vocabulary that does not divide is padded with -inf."""
    decode_mesh = make_decode_mesh(mesh_of("1,4,1"), tensor)

    def run(logits: Any, state: SamplingState, position: Any) -> Sampled:
        features = active_features(state, jnp.ones(len(position), bool), decode_mesh.replica_axes)
        return sample(logits, logits, state, features, position, decode_mesh)

    return jax.jit(
        jax.shard_map(
            run,
            mesh=decode_mesh.mesh,
            in_specs=(P(None, decode_mesh.tensor_axes or None), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
    )


def draw(logits: np.ndarray, params: list[SamplingParams], tensor: int = 1, first_seed: int = 0) -> Sampled:
    """One token for each row of ``logits``."""
    rows = len(params)
    padding = -logits.shape[1] % tensor
    padded = np.pad(logits, ((0, 0), (0, padding)), constant_values=-np.inf)
    words = np.stack([first_seed + np.arange(rows), np.full(rows, 3), np.zeros(rows)], axis=1)
    found = sampler(tensor)(padded, state_of(params, words), np.full(rows, 7, np.int32))
    return Sampled(*map(np.asarray, found))


FILTERS = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for top_k, top_p, min_p in itertools.product([None, 5], [1.0, 0.7], [0.0, 0.15])
]
LOGITS = {
    "plain": np.array([2.0, -1.0, 0.3, 1.7, 0.0, -4.0, 1.1, 0.9], np.float32),
    "ties": np.array([1.0, 0.5, 1.0, 0.5, 0.5, -np.inf, 1.0, 0.5], np.float32),
}


def test_sums_of_weights_are_exact() -> None:
    """With carries of every limb: whole multiples of 2**-36, and those that make up 1."""
    small = np.random.default_rng(0).integers(0, 2**14, (3, 900))
    mass = jax.jit(lambda weights: mass_of(sum_limbs(weights)))
    np.testing.assert_array_equal(mass(np.float32(small * 2.0**-36)), small.sum(axis=1) * 2.0**-36)
    np.testing.assert_array_equal(mass(np.full((1, 2**13), np.float32(2.0**-13))), [1.0])


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.slow), 1.8])
@pytest.mark.parametrize("logits", LOGITS)
def test_the_distribution_is_the_described_one(logits: str, temperature: float) -> None:
    count = 4096
    for number, filters in enumerate(FILTERS):
        params = SamplingParams(max_new_tokens=1, temperature=temperature, **filters)
        expected = step_of(LOGITS[logits], params, (), ())
        got = draw(np.tile(LOGITS[logits], (count, 1)), [params] * count, first_seed=number * count)
        counts, mean = np.bincount(got.token, minlength=8), np.exp(expected.logprobs) * count
        inside = mean > 0
        assert not counts[~inside].any(), f"{filters}: a token that is filtered out was drawn"
        freedom = inside.sum() - 1
        statistic = float(((counts - mean)[inside] ** 2 / mean[inside]).sum())
        print(f"{filters}: {inside.sum()} tokens, chi-square {statistic:.1f}")
        assert statistic <= chi2.isf(1e-4, freedom) if freedom else counts.max() == count, filters
        np.testing.assert_allclose(got.sampled_logprob, expected.logprobs[got.token], atol=2e-6)


@pytest.mark.slow
def test_neutral_filters_are_the_identity() -> None:
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    plain = [SamplingParams(max_new_tokens=1, temperature=t) for t in rng.choice([0.0, 0.5, 1.0], ROWS)]
    alone = draw(logits, plain)
    # With a row that filters, all rows go through the filters.
    filtering = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=2, top_p=0.5, min_p=0.1)
    together = draw(logits, [*plain[:-1], filtering])
    large = [
        SamplingParams(max_new_tokens=1, temperature=p.temperature, top_k=VOCAB + 5, top_p=1.0, min_p=0.0)
        for p in plain
    ]
    without = draw(logits, large)
    for a, b, c in zip(alone, together, without, strict=True):
        np.testing.assert_array_equal(a[:-1], b[:-1])
        np.testing.assert_array_equal(a, c)
    same = np.array([p.temperature == 1 for p in plain])
    np.testing.assert_array_equal(alone.sampled_logprob[same], alone.logprob[same])
    assert not alone.sampled_logprob[np.array([p.temperature == 0 for p in plain])].any()


def test_all_of_the_probability_is_all_tokens_also_those_without_any() -> None:
    """Beside a slot that filters; the tokens far from the peak have a weight of 0 in float32."""

    @jax.jit
    def mask(scores: jax.Array, limits: jax.Array) -> jax.Array:
        candidates = Candidates.of(scores, jnp.arange(4))
        return top_p(candidates, keep_all(2), limits).mask(candidates)

    found = mask(np.float32([[0.0, -200.0, 1.0, -math.inf]] * 2), np.float32([1.0, 0.5]))
    assert found.tolist() == [[True] * 4, [False, False, True, False]]


SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.5, -math.inf, 1e-30, -1e-40, 80.0]), st.floats(-30, 30, width=32)
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[SamplingParams]]:
    """Rows of scores with ties, infinities and zeros of both signs, each with its own filters."""
    rows, params = [], []
    for _ in range(4):
        row = np.array(draw(st.lists(SCORES, min_size=VOCAB, max_size=VOCAB)), np.float32)
        row[draw(st.integers(0, VOCAB - 1))] = draw(st.floats(-5, 5, width=32))  # one at least is finite
        rows.append(row)
        params.append(
            SamplingParams(
                max_new_tokens=1,
                temperature=1.0,
                top_k=draw(st.one_of(st.none(), st.integers(1, VOCAB + 2))),
                top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.25, 1e-6])),
                min_p=draw(st.sampled_from([0.0, 0.01, 0.5, 1.0])),
            )
        )
    return np.stack(rows), params


@pytest.mark.nightly  # in make slow: test_sampling.py
@settings(max_examples=20)
@given(cases())
def test_what_is_kept_is_the_same_in_every_layout(case: tuple[np.ndarray, list[SamplingParams]]) -> None:
    scores, params = case
    for row, one in zip(scores, params, strict=True):
        order = row[np.argsort(-row, kind="stable")][: one.top_k]
        near = np.abs(shares(order) / (one.top_p * (1 - SLACK)) - 1)
        assume(one.top_p == 1 or near.min() > 3e-7)  # float32 cannot tell
    # The probability of what is drawn says how much is kept; the draw itself, whether it is the right part.
    results = [draw(scores, params, tensor) for tensor in (1, 2, 4)]
    for row, one, token, logprob in zip(scores, params, results[0].token, results[0].sampled_logprob, strict=True):
        expected = step_of(row, one, (), ())
        assert kept(row, one)[token]
        assert abs(logprob - expected.logprobs[token]) < 1e-5, one
    for other in results[1:]:
        np.testing.assert_array_equal(other.token, results[0].token)
        np.testing.assert_allclose(other.sampled_logprob, results[0].sampled_logprob, atol=1e-6)


@pytest.mark.parametrize("tensor", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4))])
def test_among_equal_scores_the_first_tokens_are_kept(tensor: int) -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    for number, (params, ids) in enumerate(
        [
            ({"top_k": 7}, range(7)),
            ({"top_p": 1 / 3}, range(7)),
            ({"top_p": 0.3}, range(7)),  # 6.3 of 21
            ({"top_k": 10, "top_p": 0.3}, range(3)),
            ({"min_p": 1.0}, range(VOCAB)),
            ({"top_k": 6, "min_p": 1.0}, range(6)),
        ]
    ):
        one = SamplingParams(max_new_tokens=1, temperature=1.0, **params)
        got = draw(logits, [one] * ROWS, tensor, first_seed=ROWS * number)
        assert set(got.token.tolist()) == set(ids), params
        np.testing.assert_allclose(got.sampled_logprob, -math.log(len(ids)), atol=1e-6)


@pytest.mark.slow
def test_a_large_vocabulary_far_from_its_peak() -> None:
    # 100,000 tokens of which each has a weight that float32 sums would lose beside the peak.
    logits = np.full((2, 100_001), -16.0, np.float32)
    logits[:, 77] = 0.0
    params = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.995)
    got = draw(logits, [params] * 2)
    expected = step_of(logits[0], params, (), ())
    kept_count = np.isfinite(expected.logprobs).sum()
    assert 50_000 < kept_count < 90_000
    np.testing.assert_allclose(got.sampled_logprob, expected.logprobs[got.token], atol=1e-5)


def test_nothing_sorts_the_vocabulary() -> None:
    vocab = 4 * SIZE
    logits = np.zeros((4, vocab), np.float32)
    params = [SamplingParams(max_new_tokens=1, temperature=1.0, top_k=2, top_p=0.5, min_p=0.1)] * 4
    state = state_of(params, np.zeros((4, 3)))
    text = sampler(1).lower(logits, state, np.zeros(4, np.int32)).compile().as_text()
    text = without_source_locations(text)  # names of functions are no operations
    # One selection of the largest for the short list, which XLA makes a sort of when its result is used otherwise.
    assert "while" in text and text.count('custom_call_target="TopK"') == 1 and " sort(" not in text


SOME = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
"""A value of each filter that narrows."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("asked", [{}, *({name: SOME[name]} for name in SOME)], ids=str)
def test_a_request_has_filters_where_one_of_them_is_requested(asked: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(max_new_tokens=1, temperature=temperature, **asked)
    requested = [each.name for each in ALL_FILTERS if each.is_requested(params)]
    assert requested == list(asked) and params.has_filters == (temperature > 0 and bool(asked))


@pytest.mark.parametrize("each", ALL_FILTERS, ids=lambda each: each.name)
def test_a_filter_alone_reaches_its_program(each: Filter) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=1.0, **{each.name: SOME[each.name]})
    asked = Sequence(request=Request(prompt_id=0, prompt_tokens=(1,), params=params), generation_id=0)
    batch = SamplingBatch.empty(capacity_of(slots=2, **sampling_sizes([params])))
    batch.set((0, 1), asked)
    narrows = {other.name: other.narrows(batch.arrays()[other.parameter]).tolist() for other in ALL_FILTERS}
    assert narrows == {other.name: [[False, other.name == each.name]] for other in ALL_FILTERS}


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9, "min_p": 0.02}]),
    st.sampled_from([0.01, 0.2, 1.0]),
)
def test_the_oracle_knows_what_rounding_can_move_over_an_edge(seed: int, filters: dict[str, Any], slack: float) -> None:
    rng, params = np.random.default_rng(seed), SamplingParams(max_new_tokens=1, temperature=1.0, **filters)
    scores = (2 * rng.standard_normal(VOCAB)).astype(np.float32)
    rounded = (scores + 0.49 * slack * rng.uniform(-1, 1, VOCAB)).astype(np.float32)
    may, surely, found = kept_within(scores, params, slack), kept_within(scores, params, -slack), kept(rounded, params)
    assert np.all(surely <= found) and np.all(found <= may)
    assert np.array_equal(kept_within(scores, params, 1e-9), kept(scores, params))


def top_n_sigma(scores: Any, n: Any) -> Any:
    """Scores within n standard deviations of the largest (Tang et al. 2024, arXiv 2411.07641)."""
    real = jnp.isfinite(scores)
    count = jnp.sum(real, axis=1)
    mean = jnp.sum(jnp.where(real, scores, 0.0), axis=1) / count
    spread = jnp.sqrt(jnp.sum(jnp.where(real, (scores - mean[:, None]) ** 2, 0.0), axis=1) / count)
    return jnp.max(scores, axis=1) - n * spread


def beyond_the_largest(scores: Any, by: Any) -> Any:
    return jnp.max(scores, axis=1) + by


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{__name__}:top_n_sigma", 1),
        *(pytest.param("top_n_sigma", tensor, marks=pytest.mark.slow) for tensor in (1, 2)),
    ],
)
def test_a_named_filter_comes_after_the_others_and_only_where_it_is_asked_for(name: str, tensor: int) -> None:
    logits = np.tile(np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32) * 2, (3 * 512, 1))
    asked = [{"top_k": 12, "filters": (f"{name}=1.2",)}, {"top_k": 12}, {"filters": (f"{name}=1.2",)}]
    params = [SamplingParams(max_new_tokens=1, temperature=1.5, **each) for each in asked for _ in range(512)]
    tokens = draw(logits, params, tensor).token.reshape(3, 512)
    scores = np.sort(logits[0].astype(np.float64) / 1.5)[::-1]
    for drawn, left in ((tokens[0], scores[:12]), (tokens[2], scores)):
        least = left[0] - 1.2 * left.std()
        assert set(drawn.tolist()) == {i for i in range(VOCAB) if logits[0, i] / 1.5 >= least}
    assert len(set(tokens[1].tolist())) == 12


@pytest.mark.slow
def test_the_most_probable_token_is_always_kept() -> None:
    params = SamplingParams(max_new_tokens=1, temperature=1.0, filters=(f"{__name__}:beyond_the_largest=3",))
    logits = np.array([[0.0, 2.0, 2.0, 1.0]], np.float32)
    assert {int(draw(logits, [params], first_seed=seed).token[0]) for seed in range(20)} == {1, 2}


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        (("a.b=1",), "filters has 'a.b=1'; one is name=value, such as top_n_sigma=1.5, or module:function=value"),
        (("my:f",), "filters has 'my:f'; one is name=value"),
        (("my:f=nan",), "filters has 'my:f=nan'"),
        (("my:f=1", "my:f=2"), "has a filter twice"),
        ("my:f=1", "it must be a list"),
    ],
)
def test_filters_are_written_as_name_and_value(filters: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(max_new_tokens=1, temperature=1.0, filters=filters)


def test_a_filter_that_ships_has_a_range_and_a_key_of_a_configuration_names_it() -> None:
    assert InferenceEvalConfig(prompts=["x"], temperature=1.0, filters=("top_n_sigma=1.5", "not_imported:f=3"))
    for text, why in (
        ("top_n_sigma=-1", "it must be at least 0. Change it"),
        ("top_sigma=1", "it must be top_n_sigma, or"),
    ):
        with pytest.raises(ConfigError, match=f"inference_eval: filters has .*{why}"):
            InferenceEvalConfig(prompts=["x"], temperature=1.0, filters=(text,))
        with pytest.raises(ConfigError, match=why):
            check_named_filters(SamplingParams(max_new_tokens=1, temperature=1.0, filters=(text,)).filter_values())
