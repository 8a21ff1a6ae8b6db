"""Top-k, top-p and min-p over a vocabulary that the devices of a replica share; inside ``shard_map``.

Nothing is sorted. The tokens that a filter keeps are always a beginning of the order (score descending, token id
ascending), so a filter is two numbers per slot: the least score kept, and the last token id kept among those of that
score. Both are found by bisection over the bits of the score, with sums of integers, which come out the same in
whatever order and on however many devices they are added.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from lockstep.placement import DecodeMesh

_SLACK = 1e-6
"""A set whose probability is ``top_p`` in exact arithmetic must count as such in float32."""

_LIMB = 4096.0
"""Weights are whole multiples of 2**-36 in three limbs of 12 bits: int32 sums hold vocabularies of up to 2**19."""

_EVERY_ID = jnp.iinfo(jnp.int32).max


class TokenThreshold(NamedTuple):
    """What may be drawn of each slot: scores above ``least``, and of those equal to it the ids up to ``last``."""

    least: UInt[Array, " slot"]
    """As an `sortable_bits`."""
    last: Int[Array, " slot"]

    def mask(
        self, image: UInt[Array, "slot local_vocab"], ids: Int[Array, " local_vocab"]
    ) -> Bool[Array, "slot local_vocab"]:
        """Which of this device's tokens are kept."""
        least = self.least[:, None]
        return (image > least) | ((image == least) & (ids <= self.last[:, None]))


def keep_all(slots: int) -> TokenThreshold:
    """No filter."""
    return TokenThreshold(jnp.zeros(slots, jnp.uint32), jnp.full(slots, _EVERY_ID, jnp.int32))


def sortable_bits(scores: Float[Array, "slot local_vocab"]) -> UInt[Array, "slot local_vocab"]:
    """Float32 scores as unsigned integers in the same order; -0 and 0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def top_k(
    image: UInt[Array, "slot local_vocab"],
    k: Int[Array, " slot"],
    ids: Int[Array, " local_vocab"],
    decode_mesh: DecodeMesh,
) -> TokenThreshold:
    """The ``k`` largest scores of each slot; all where ``k`` is 0."""
    image = jax.lax.optimization_barrier(image)  # else it is computed again in every step of the bisection

    def count(chosen: Array) -> Array:
        return _sum(jnp.sum(chosen, axis=1, dtype=jnp.int32), decode_mesh)

    least = _largest(lambda bound: count(image >= bound[:, None]) >= k, k.shape[0])
    at_least = image == least[:, None]
    last = _nth(at_least, k - count(image > least[:, None]), ids, decode_mesh)
    every = keep_all(k.shape[0])
    return TokenThreshold(jnp.where(k > 0, least, every.least), jnp.where(k > 0, last, every.last))


def top_p(
    scores: Float[Array, "slot local_vocab"],
    image: UInt[Array, "slot local_vocab"],
    kept: TokenThreshold,
    p: Float[Array, " slot"],
    ids: Int[Array, " local_vocab"],
    decode_mesh: DecodeMesh,
) -> TokenThreshold:
    """Of what is kept, the smallest beginning with at least ``p`` of its probability; all of it where ``p`` is 1.

    Nucleus sampling (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751, eq. 2 and 3).
    """
    inside = kept.mask(image, ids)
    weight = jnp.where(inside, jnp.exp(scores - _max(scores, decode_mesh)[:, None]), 0.0)
    high = jnp.floor(weight * _LIMB)
    rest = weight * _LIMB - high
    middle = jnp.floor(rest * _LIMB)
    low = jnp.round((rest * _LIMB - middle) * _LIMB)
    limbs = [part.astype(jnp.int32) for part in (high, middle, low)]
    image, *limbs = jax.lax.optimization_barrier((image, *limbs))

    def sum_exp(chosen: Array) -> Array:
        sums = _sum(jnp.stack([jnp.sum(jnp.where(chosen, limb, 0), axis=1) for limb in limbs]), decode_mesh)
        return _to_float(*sums)

    target = p * (1 - _SLACK) * sum_exp(inside)
    least = _largest(lambda bound: sum_exp(image >= bound[:, None]) >= target, p.shape[0])
    at_least = inside & (image == least[:, None])
    each = _max(jnp.where(at_least, weight, 0.0), decode_mesh)
    needed = jnp.ceil((target - sum_exp(image > least[:, None])) / jnp.where(each > 0, each, 1.0))
    last = _nth(at_least, jnp.clip(needed, 1, 2.0**30).astype(jnp.int32), ids, decode_mesh)
    last = jnp.where(least == kept.least, jnp.minimum(last, kept.last), last)
    return TokenThreshold(jnp.where(p < 1, least, kept.least), jnp.where(p < 1, last, kept.last))


def min_p(
    scores: Float[Array, "slot local_vocab"],
    image: UInt[Array, "slot local_vocab"],
    kept: TokenThreshold,
    log_min_p: Float[Array, " slot"],
    decode_mesh: DecodeMesh,
) -> TokenThreshold:
    """Of what is kept, the tokens at least ``exp(log_min_p)`` times as probable as the most probable one.

    Min-p sampling (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082, section 3).
    """
    near = scores - _max(scores, decode_mesh)[:, None] >= log_min_p[:, None]
    least = jnp.min(jnp.where(near, image, jnp.uint32(0xFFFFFFFF)), axis=1)
    if decode_mesh.tensor > 1:
        least = jax.lax.pmin(least, decode_mesh.tensor_axes)
    tighter = (log_min_p > -jnp.inf) & (least > kept.least)
    return TokenThreshold(jnp.where(tighter, least, kept.least), jnp.where(tighter, _EVERY_ID, kept.last))


def _largest(enough: Callable[[Array], Array], slots: int) -> UInt[Array, " slot"]:
    """The largest bound of each slot that is ``enough``, 0 where none is; all bounds below one that is enough are."""

    def bit(i: Array, bound: Array) -> Array:
        larger = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(larger), larger, bound)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(slots, jnp.uint32))


def _nth(
    chosen: Bool[Array, "slot local_vocab"],
    n: Int[Array, " slot"],
    ids: Int[Array, " local_vocab"],
    decode_mesh: DecodeMesh,
) -> Int[Array, " slot"]:
    """The id of the ``n``-th chosen token of each slot, or every id where no more than ``n`` are chosen."""
    own = jnp.sum(chosen, axis=1, dtype=jnp.int32)
    before = jnp.zeros_like(own)
    total = own
    if decode_mesh.tensor > 1:
        counts = jax.lax.all_gather(own, decode_mesh.tensor_axes)  # [part, slot]; parts in order of token id
        part = jax.lax.axis_index(decode_mesh.tensor_axes)
        before = jnp.sum(jnp.where(jnp.arange(decode_mesh.tensor)[:, None] < part, counts, 0), axis=0)
        total = jnp.sum(counts, axis=0)

    def search(chosen: Array) -> Array:
        rank = before[:, None] + jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
        return jnp.sum(jnp.where(chosen & (rank == n[:, None]), ids, 0), axis=1, dtype=jnp.int32)

    # Equal scores are rare. The branches hold no collective, so devices may differ.
    found = jax.lax.cond(jnp.any(total > n), search, lambda chosen: jnp.zeros_like(own), chosen)
    return jnp.where(total > n, _sum(found, decode_mesh), _EVERY_ID)


def _to_float(high: Array, middle: Array, low: Array) -> Float[Array, " slot"]:
    """Sums of limbs as one number; the more, the larger, also after rounding."""
    bits = 12
    middle, low = middle + (low >> bits), low & (2**bits - 1)
    high, middle = high + (middle >> bits), middle & (2**bits - 1)
    fine = ((middle << bits) + low).astype(jnp.float32)
    return high.astype(jnp.float32) * 2.0**-bits + fine * 2.0 ** (-3 * bits)


def _sum(x: Array, decode_mesh: DecodeMesh) -> Array:
    return jax.lax.psum(x, decode_mesh.tensor_axes) if decode_mesh.tensor > 1 else x


def _max(scores: Array, decode_mesh: DecodeMesh) -> Float[Array, " slot"]:
    top = jnp.max(scores, axis=1)
    return jax.lax.pmax(top, decode_mesh.tensor_axes) if decode_mesh.tensor > 1 else top
