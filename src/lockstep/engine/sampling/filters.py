"""Top-k, top-p and min-p over a vocabulary that is split over the devices of a replica; inside ``shard_map``.

Nothing is sorted. The tokens that a filter keeps are always a prefix of the order (score descending, token id
ascending), so a filter is two numbers per slot: the least score kept, and the last token id kept among those of that
score. Both are found by bisection over the bits of the score, with sums of integers, which are the same in whatever
order and on however many devices they are added.

A new filter is a function here and its entry in `FILTERS`, a field in `lockstep.types`, and an array in
`lockstep.schedule.SamplingBatch`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from lockstep.placement import DecodeMesh
from lockstep.types import SamplingParams

_SLACK = 1e-6
"""A set whose probability is ``top_p`` in exact arithmetic must count as such in float32."""

_LIMB = 4096.0
"""Weights are multiples of 2**-36 in three limbs of 12 bits: int32 sums of a limb are exact up to 2**19 tokens."""

_ALL_IDS = jnp.iinfo(jnp.int32).max


class Candidates(NamedTuple):
    """The tokens of this device's part of the vocabulary, with the scores that they are drawn by."""

    scores: Float[Array, "slot local_vocab"]
    """The processed logits divided by the temperature."""
    bits: UInt[Array, "slot local_vocab"]
    """The scores as `sortable_bits`."""
    ids: Int[Array, " local_vocab"]
    """The token ids."""

    @classmethod
    def of(cls, scores: Float[Array, "slot local_vocab"], ids: Int[Array, " local_vocab"]) -> "Candidates":
        """The candidates with the given scores."""
        return cls(scores, sortable_bits(scores), ids)


class TokenThreshold(NamedTuple):
    """The tokens of each slot that may be drawn: scores above ``least``, and of equal scores the ids up to ``last``."""

    least: UInt[Array, " slot"]
    """A score as `sortable_bits`."""
    last: Int[Array, " slot"]
    """A token id."""

    def mask(self, candidates: Candidates) -> Bool[Array, "slot local_vocab"]:
        """Whether each of this device's tokens is kept."""
        least = self.least[:, None]
        return (candidates.bits > least) | ((candidates.bits == least) & (candidates.ids <= self.last[:, None]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """One filter on the distribution after temperature.

    Args:
        name: The name, by which `plan` finds the filter in a compiled program.
        parameter: The field of `lockstep.schedule.SamplingBatch` that has its parameter for each slot.
        is_requested: Whether a request needs the filter.
        narrows: Whether the filter does anything in each slot, by the parameter.
        apply: The filter: takes the candidates, the threshold so far, the parameter and the decode mesh; returns a
            threshold that keeps no more than the one so far.
    """

    name: str
    parameter: str
    is_requested: Callable[[SamplingParams], bool]
    narrows: Callable[[Array], Array]
    apply: Callable[[Candidates, TokenThreshold, Array, DecodeMesh], TokenThreshold]


def keep_all(slots: int) -> TokenThreshold:
    """The threshold that keeps every token."""
    return TokenThreshold(jnp.zeros(slots, jnp.uint32), jnp.full(slots, _ALL_IDS, jnp.int32))


def sortable_bits(scores: Float[Array, "slot local_vocab"]) -> UInt[Array, "slot local_vocab"]:
    """Converts float32 scores to unsigned integers in the same order; -0 and 0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def top_k(
    candidates: Candidates, threshold: TokenThreshold, k: Int[Array, " slot"], decode_mesh: DecodeMesh
) -> TokenThreshold:
    """Keeps the ``k`` largest scores of each slot, all where ``k`` is 0; the first filter, so ``threshold`` keeps all.

    Top-k sampling (Fan et al. 2018, https://arxiv.org/abs/1805.04833).
    """
    del threshold
    bits = jax.lax.optimization_barrier(candidates.bits)  # else each step of the bisection computes them again

    def count(chosen: Array) -> Array:
        return _sum(jnp.sum(chosen, axis=1, dtype=jnp.int32), decode_mesh)

    least = _largest_bound(lambda bound: count(bits >= bound[:, None]) >= k, k.shape[0])
    equal = bits == least[:, None]
    last = _nth_id(equal, k - count(bits > least[:, None]), candidates.ids, decode_mesh)
    every = keep_all(k.shape[0])
    return TokenThreshold(jnp.where(k > 0, least, every.least), jnp.where(k > 0, last, every.last))


def top_p(
    candidates: Candidates, threshold: TokenThreshold, p: Float[Array, " slot"], decode_mesh: DecodeMesh
) -> TokenThreshold:
    """Keeps the smallest prefix of what is kept with at least ``p`` of its probability; all of it where ``p`` is 1.

    Nucleus sampling (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751, eq. 2 and 3).
    """
    kept = threshold.mask(candidates)
    weight = jnp.where(kept, jnp.exp(candidates.scores - _max(candidates.scores, decode_mesh)[:, None]), 0.0)
    high = jnp.floor(weight * _LIMB)
    rest = weight * _LIMB - high
    middle = jnp.floor(rest * _LIMB)
    low = jnp.round((rest * _LIMB - middle) * _LIMB)
    limbs = [part.astype(jnp.int32) for part in (high, middle, low)]
    bits, *limbs = jax.lax.optimization_barrier((candidates.bits, *limbs))

    def sum_exp(chosen: Array) -> Array:
        sums = _sum(jnp.stack([jnp.sum(jnp.where(chosen, limb, 0), axis=1) for limb in limbs]), decode_mesh)
        return _to_float(*sums)

    target = p * (1 - _SLACK) * sum_exp(kept)
    least = _largest_bound(lambda bound: sum_exp(bits >= bound[:, None]) >= target, p.shape[0])
    equal = kept & (bits == least[:, None])
    each = _max(jnp.where(equal, weight, 0.0), decode_mesh)
    needed = jnp.ceil((target - sum_exp(bits > least[:, None])) / jnp.where(each > 0, each, 1.0))
    last = _nth_id(equal, jnp.clip(needed, 1, 2.0**30).astype(jnp.int32), candidates.ids, decode_mesh)
    last = jnp.where(least == threshold.least, jnp.minimum(last, threshold.last), last)
    return TokenThreshold(jnp.where(p < 1, least, threshold.least), jnp.where(p < 1, last, threshold.last))


def min_p(
    candidates: Candidates, threshold: TokenThreshold, log_min_p: Float[Array, " slot"], decode_mesh: DecodeMesh
) -> TokenThreshold:
    """Keeps of what is kept the tokens at least ``exp(log_min_p)`` times as probable as the most probable one.

    Min-p sampling (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082, section 3).
    """
    near = candidates.scores - _max(candidates.scores, decode_mesh)[:, None] >= log_min_p[:, None]
    least = jnp.min(jnp.where(near, candidates.bits, jnp.uint32(0xFFFFFFFF)), axis=1)
    if decode_mesh.tensor > 1:
        least = jax.lax.pmin(least, decode_mesh.tensor_axes)
    tighter = (log_min_p > -jnp.inf) & (least > threshold.least)
    return TokenThreshold(jnp.where(tighter, least, threshold.least), jnp.where(tighter, _ALL_IDS, threshold.last))


FILTERS = (
    Filter(
        name="top_k",
        parameter="top_k",
        is_requested=lambda params: params.top_k is not None,
        narrows=lambda k: k > 0,
        apply=top_k,
    ),
    Filter(
        name="top_p",
        parameter="top_p",
        is_requested=lambda params: params.top_p < 1,
        narrows=lambda p: p < 1,
        apply=top_p,
    ),
    Filter(
        name="min_p",
        parameter="log_min_p",
        is_requested=lambda params: params.min_p > 0,
        narrows=lambda log_min_p: log_min_p > -jnp.inf,
        apply=min_p,
    ),
)
"""The filters in the order in which they are applied."""


def _largest_bound(enough: Callable[[Array], Array], slots: int) -> UInt[Array, " slot"]:
    """The largest bound of each slot that is ``enough``, 0 where none is; whatever is below such a bound is one too."""

    def bit(i: Array, bound: Array) -> Array:
        larger = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(larger), larger, bound)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(slots, jnp.uint32))


def _nth_id(
    chosen: Bool[Array, "slot local_vocab"],
    n: Int[Array, " slot"],
    ids: Int[Array, " local_vocab"],
    decode_mesh: DecodeMesh,
) -> Int[Array, " slot"]:
    """The id of the ``n``-th chosen token of each slot, or the largest int32 where no more than ``n`` are chosen."""
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

    # Equal scores are rare. The branches have no collective, so devices may take different ones.
    found = jax.lax.cond(jnp.any(total > n), search, lambda chosen: jnp.zeros_like(own), chosen)
    return jnp.where(total > n, _sum(found, decode_mesh), _ALL_IDS)


def _to_float(high: Array, middle: Array, low: Array) -> Float[Array, " slot"]:
    """Sums of limbs as one float32, monotonic in their exact value."""
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
