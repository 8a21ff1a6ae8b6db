import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine.sampling.noise import _fold_in, gumbel_noise

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
