"""Top-k, top-p and min-p by bisection over all tokens of a slot: what the engine keeps, to the last bit."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


@jax.jit
def kept_tokens(scores: Array, k: Array, p: Array, log_min_p: Array) -> Array:
    """Whether each token is kept.

    Weights are multiples of 2**-36 in three limbs of 12 bits, so that their sums are exact. It was the engine's own
    search until a short list took its place in most steps.

    Args:
        scores: float32 ``[slot, vocab]``, after temperature.
        k: int32 ``[slot]``; 0 keeps all.
        p: float32 ``[slot]``.
        log_min_p: float32 ``[slot]``; -inf keeps all.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    bits = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def count(chosen: Array) -> Array:
        return jnp.sum(chosen, axis=1, dtype=jnp.int32)

    least = _largest_bound(lambda bound: count(bits >= bound[:, None]) >= k, len(k))
    equal = bits == least[:, None]
    kept = (bits > least[:, None]) | _first(equal, k - count(bits > least[:, None]))
    kept = jnp.where(k[:, None] > 0, kept, True)

    largest = jnp.max(scores, axis=1)[:, None]
    weight = jnp.where(kept, jnp.exp(scores - largest), 0.0)
    high = jnp.floor(weight * 4096)
    rest = weight * 4096 - high
    middle = jnp.floor(rest * 4096)
    low = jnp.round((rest * 4096 - middle) * 4096)

    def mass(chosen: Array) -> Array:
        a, b, c = (jnp.sum(jnp.where(chosen, limb, 0).astype(jnp.int32), axis=1) for limb in (high, middle, low))
        b, c = b + (c >> 12), c & 4095
        a, b = a + (b >> 12), b & 4095
        return a.astype(jnp.float32) * 2.0**-12 + ((b << 12) + c).astype(jnp.float32) * 2.0**-36

    target = p * (1 - 1e-6) * mass(kept)
    least = _largest_bound(lambda bound: mass(bits >= bound[:, None]) >= target, len(p))
    equal = kept & (bits == least[:, None])
    each = jnp.max(jnp.where(equal, weight, 0.0), axis=1)
    needed = jnp.ceil((target - mass(bits > least[:, None])) / jnp.where(each > 0, each, 1.0))
    nucleus = (bits > least[:, None]) | _first(equal, jnp.clip(needed, 1, 2.0**30).astype(jnp.int32))
    kept = jnp.where(p[:, None] < 1, kept & nucleus, kept)
    return kept & (scores - largest >= log_min_p[:, None])


def _largest_bound(enough: Callable[[Array], Array], slots: int) -> Array:
    def bit(i: Array, bound: Array) -> Array:
        larger = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(larger), larger, bound)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(slots, jnp.uint32))


def _first(chosen: Array, n: Array) -> Array:
    return chosen & (jnp.cumsum(chosen, axis=1, dtype=jnp.int32) <= n[:, None])
