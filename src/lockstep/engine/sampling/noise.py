"""The random numbers of a draw: Gumbel noise that depends on (seed, prompt, generation, position, token) alone."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY: Final = 0x1BD11BDA


def gumbel_noise(
    words: UInt[Array, " 3"], position: Int[Array, ""], ids: Int[Array, " token"]
) -> Float[Array, " token"]:
    """Returns the noise of a slot for each token id, the same wherever and in whatever batch it is computed.

    Args:
        words: The seed, the prompt number and the generation number.
        position: The position of the token to sample.
        ids: The token ids.
    """
    seed, prompt, generation = words
    key = jax.random.key(seed, impl="threefry2x32")
    for part in (prompt, generation, position):
        key = jax.random.fold_in(key, part)
    # One key per token id, not one array of noise: a device draws its own part of the vocabulary and nothing else.
    bits = _fold_in(jax.random.key_data(key), ids)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _fold_in(key: UInt[Array, " 2"], data: Int[Array, " token"]) -> UInt[Array, " token"]:
    """Returns the first word of `jax.random.fold_in` of each number, all 20 rounds in one expression.

    Threefry-2x32 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405, section 3.3). JAX rolls the rounds up
    into a loop on CPUs, which writes the words of all tokens to memory in each turn and takes twice as long.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    left, right = jnp.broadcast_to(schedule[0], data.shape), schedule[1] + data.astype(jnp.uint32)
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = left ^ ((right << rotation) | (right >> (32 - rotation)))
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left
