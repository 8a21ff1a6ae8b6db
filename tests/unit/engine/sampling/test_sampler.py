"""Random draws: their distribution, and what they depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.engine.sampling.sampler import (
    SamplingState,
    _fold_in,
    active_features,
    first_largest,
    gumbel_noise,
    sample,
)
from lockstep.placement.decode_mesh import make_decode_mesh
from tests import oracle
from tests.oracle import oracle_completions
from tests.unit.engine.models import LLAMA, mesh_of, model_on, request

VOCAB = 8


@pytest.mark.slow
def test_the_distribution_at_temperature_1_is_the_softmax() -> None:
    model, mesh = model_on("1,4,1", LLAMA, VOCAB), mesh_of("1,4,1")
    requests = [request(i, (6, 3), 1, temperature=1.0, seed=i % 4, n_generations=128) for i in range(32)]
    got = Engine(EngineConfig(), mesh).generate(model, requests)
    logits = oracle_completions(model, [request(0, (6, 3), 1)])[0].scores[0].astype(np.float64)
    expected = np.exp(logits - logits.max())
    expected *= len(got) / expected.sum()
    counts = np.bincount([c.tokens[0] for c in got], minlength=VOCAB)
    assert len(got) == 4096 and expected.min() > 20
    statistic = float(((counts - expected) ** 2 / expected).sum())
    print(f"chi-square {statistic:.2f} with {VOCAB - 1} degrees of freedom")
    assert statistic < 24.32, "below 24.32 in 999 cases of 1000 (7 degrees of freedom)"


def draws(words: list[tuple[int, int, int]], positions: list[int], vocab: int = 1000) -> np.ndarray:
    """Tokens drawn from equal logits: the argmax of the noise alone."""
    args = (np.zeros((len(words), vocab), np.float32), np.ones(len(words), np.float32), np.array(words, np.uint32))
    return np.asarray(_sample(*args, np.array(positions, np.int32))[0])


@jax.jit
def _sample(logits, temperature, words, position):
    return unfiltered(logits, temperature, words, position, make_decode_mesh(mesh_of("1,1,1"), 1))


def unfiltered(logits, temperature, words, position, decode_mesh):
    """Token and log-probability under the model."""
    count = len(temperature)
    neutral = {"top_k": jnp.zeros(count, jnp.int32), "top_p": jnp.ones(count), "min_p": jnp.full(count, -jnp.inf)}
    state = SamplingState(words, temperature, neutral)
    features = active_features(state, jnp.ones(count, bool), decode_mesh.replica_axes)
    return sample(logits, logits, state, features, position, decode_mesh)[:2]


BASE, AT = (7, 5, 3), 11


def test_a_draw_depends_on_seed_prompt_generation_and_position() -> None:
    words = [BASE, (8, 5, 3), (7, 6, 3), (7, 5, 4), BASE, (5, 7, 3), (7, 3, 5)]
    tokens = draws(words, [AT] * 4 + [12] + [AT] * 2)
    assert len(set(tokens.tolist())) == len(words), "two different draws are equal"
    again = draws(words[::-1], ([AT] * 4 + [12] + [AT] * 2)[::-1])
    np.testing.assert_array_equal(again[::-1], tokens)


@pytest.mark.parametrize("words", [(0, 0, 0), (2**32 - 1, 2**32 - 1, 2**32 - 1), BASE])
def test_the_noise_is_the_described_one(words: tuple[int, int, int]) -> None:
    expected = oracle.gumbel_noise(*words, AT, 1000)
    assert draws([words], [AT])[0] == expected.argmax()
    assert np.isfinite(expected).all() and abs(expected.mean() - 0.5772) < 0.15


def test_greedy_and_sampled_in_one_batch_and_what_is_forbidden() -> None:
    logits = np.zeros((3, 6), np.float32)
    logits[:, 2], logits[:, 4:] = 1.0, -np.inf
    temperature = np.array([0.0, 0.5, 0.0], np.float32)
    words = np.array([BASE] * 3, np.uint32)
    logits[2, 3] = 1.0  # a tie goes to the lowest token
    tokens, logprobs = _sample(logits, temperature, words, np.full(3, AT, np.int32))
    noisy = logits[1] / np.float32(0.5) + oracle.gumbel_noise(*BASE, AT, 6)
    assert tokens.tolist() == [2, int(noisy.argmax()), 2]
    totals = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(logprobs, logits[np.arange(3), tokens] - totals, atol=1e-6)


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_devices_that_share_the_vocabulary_draw_what_one_draws(tensor: int) -> None:
    decode_mesh = make_decode_mesh(mesh_of("1,4,1"), tensor)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((16, 40)).astype(np.float32)
    logits[:, 21:] = -np.inf  # the last devices have nothing that is allowed
    logits[0, :21] = 1.0  # ties between devices go to the lowest token
    temperature = np.where(np.arange(16) % 2, 0.8, 0.0).astype(np.float32)
    words = rng.integers(0, 2**32, (16, 3), np.uint32)
    position = np.arange(16, dtype=np.int32)
    P = jax.sharding.PartitionSpec
    split = jax.shard_map(
        functools.partial(unfiltered, decode_mesh=decode_mesh),
        mesh=decode_mesh.mesh,
        in_specs=(P(None, decode_mesh.tensor_axes), P(), P(), P()),
        out_specs=(P(), P()),
        check_vma=False,
    )
    tokens, logprobs = jax.jit(split)(*map(jnp.asarray, (logits, temperature, words, position)))
    want_tokens, want_logprobs = _sample(logits, temperature, words, position)
    np.testing.assert_array_equal(tokens, want_tokens)
    np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-6)
    assert tokens[0] == 0


@pytest.mark.parametrize("size", [40, 128, 640, 641])  # one run of scores, or several
@pytest.mark.parametrize("seed", range(3))
def test_the_largest_is_numpys_argmax_with_ties_and_infinities(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6 * size // 40, (7, size)).astype(np.float32)  # many ties
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    scores[1], scores[2, :] = -np.inf, 5.0
    scores[3, rng.integers(size)] = np.inf
    index, largest = first_largest(jnp.asarray(scores))
    assert np.array_equal(index, np.argmax(scores, axis=1))
    assert np.array_equal(largest, scores.max(axis=1))


@pytest.mark.parametrize("size", [40, 640])
def test_where_there_is_nan_the_index_of_the_largest_is_still_one_of_the_row(size: int) -> None:
    scores = np.random.default_rng(0).standard_normal((4, size), np.float32)
    scores[0], scores[1, 1], scores[2, [1, -1]], scores[3, 7:] = np.nan, np.nan, np.nan, np.nan
    index, _ = first_largest(jnp.asarray(scores))
    assert np.all((index >= 0) & (index < size))


IDS = np.array([0, 1, 2, 127, 128, 31999, 128255, 2**24 + 1, 2**31 - 1], np.int32)


@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1])
def test_a_key_for_each_token_is_jax_s_own(seed):
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 17)
    expected = [int(jax.random.key_data(jax.random.fold_in(key, token))[0]) for token in IDS]
    found = jax.jit(_fold_in)(jax.random.key_data(key), jnp.asarray(IDS))
    assert found.dtype == jnp.uint32
    assert found.tolist() == expected


def test_noise_of_a_part_of_the_vocabulary_is_that_of_the_whole():
    words, at = jnp.array([5, 7, 1], jnp.uint32), jnp.int32(40)
    whole, part = (jax.jit(gumbel_noise)(words, at, ids) for ids in (jnp.arange(1000), jnp.arange(300, 700)))
    np.testing.assert_array_equal(whole[300:700], part)


def test_noise_is_finite_and_gumbel():
    noise = np.asarray(jax.jit(gumbel_noise)(jnp.array([1, 2, 3], jnp.uint32), jnp.int32(4), jnp.arange(200_000)))
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * (np.pi / np.sqrt(6)) / np.sqrt(noise.size)
    assert abs(noise.std() - np.pi / np.sqrt(6)) < 0.02
