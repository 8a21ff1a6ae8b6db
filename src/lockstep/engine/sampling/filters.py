"""Top-k, top-p and min-p by search over the whole vocabulary.

Nothing is sorted. The tokens that a filter keeps are always a prefix of the order (score descending, token id
ascending), so a filter is two numbers per slot: the least score kept, and the last token id kept among those of that
score. Both are found by bisection over the bits of the score, and decided by sums of integers, which are the same in
whatever order they are added. `find_threshold` asks for the search only where a `Shortlist` does not decide.

A filter that the key ``filters`` names is one function of scores: here with its entry in `NAMED`, or in any module of a
user's. The three with keys of their own also have a field in `lockstep.types` and an array in
`lockstep.engine.schedule.SamplingBatch`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from lockstep.errors import ConfigError, HostError
from lockstep.plugins import load_object
from lockstep.printable import printable
from lockstep.types import SamplingParams

_SLACK = 1e-6
"""A set whose probability is ``top_p`` in exact arithmetic must count as such in float32."""

_LIMB = 4096.0
"""Weights are multiples of 2**-36 in three limbs of 12 bits: int32 sums of a limb are exact up to 2**19 tokens."""

_ALL_IDS = jnp.iinfo(jnp.int32).max


class Candidates(NamedTuple):
    """Tokens with the scores that they are drawn by: all of the vocabulary, or a device's part of it."""

    scores: Float[Array, "slot token"]
    """The processed logits divided by the temperature."""
    bits: UInt[Array, "slot token"]
    """The scores as `sortable_bits`."""
    ids: Int[Array, " token"]
    """The token ids."""

    @classmethod
    def of(cls, scores: Float[Array, "slot token"], ids: Int[Array, " token"]) -> "Candidates":
        """The candidates with the given scores."""
        return cls(scores, sortable_bits(scores), ids)


class TokenThreshold(NamedTuple):
    """The tokens of each slot that may be drawn: scores above ``least``, and of equal scores the ids up to ``last``."""

    least: UInt[Array, " slot"]
    """A score as `sortable_bits`."""
    last: Int[Array, " slot"]
    """A token id."""

    def mask(self, candidates: Candidates) -> Bool[Array, "slot token"]:
        """Whether each token is kept."""
        least = self.least[:, None]
        return (candidates.bits > least) | ((candidates.bits == least) & (candidates.ids <= self.last[:, None]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """One filter on the distribution after temperature.

    Args:
        name: The field of `SamplingParams`, or the name in its ``filters``; `plan` finds the filter by it in a
            compiled program.
        apply: The filter: takes all tokens of the vocabulary, the threshold so far and the parameter; returns a
            threshold that keeps no more than the one so far. It contains no collective.
    """

    name: str
    parameter: str  # field of `SamplingBatch` that has its parameter for each slot
    narrows: Callable[[Array], Array]  # whether it does anything in each slot, by the parameter
    apply: Callable[[Candidates, TokenThreshold, Array], TokenThreshold]

    def is_requested(self, params: SamplingParams) -> bool:
        """Whether a request needs the filter."""
        named = self.parameter == "more_filters"
        return self.name in params.filter_values() if named else params.is_set(self.name)


def keep_all(slots: int) -> TokenThreshold:
    """The threshold that keeps every token."""
    return TokenThreshold(jnp.zeros(slots, jnp.uint32), jnp.full(slots, _ALL_IDS, jnp.int32))


def sortable_bits(scores: Float[Array, "slot token"]) -> UInt[Array, "slot token"]:
    """Convert float32 scores to unsigned integers in the same order; -0 and 0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def limbs_of(weight: Float[Array, "slot token"]) -> list[Int[Array, "slot token"]]:
    """Split weights, which are at most 1, into limbs whose sums are exact."""
    high = jnp.floor(weight * _LIMB)
    rest = weight * _LIMB - high
    middle = jnp.floor(rest * _LIMB)
    low = jnp.round((rest * _LIMB - middle) * _LIMB)
    return [limb.astype(jnp.int32) for limb in (high, middle, low)]


def sum_limbs(weight: Float[Array, "slot token"]) -> Int[Array, "3 slot"]:
    """Return the sums of the limbs of each slot."""
    return jnp.stack([jnp.sum(limb, axis=1) for limb in limbs_of(weight)])


def mass_of(limbs: Int[Array, "3 ..."]) -> Float[Array, "..."]:
    """Convert sums of limbs to one float32, monotonic in their exact value."""
    high, middle, low = limbs
    bits = 12
    middle, low = middle + (low >> bits), low & (2**bits - 1)
    high, middle = high + (middle >> bits), middle & (2**bits - 1)
    fine = ((middle << bits) + low).astype(jnp.float32)
    return high.astype(jnp.float32) * 2.0**-bits + fine * 2.0 ** (-3 * bits)


def needed_mass(p: Float[Array, " slot"], total: Float[Array, " slot"]) -> Float[Array, " slot"]:
    """Return the mass that top-p keeps at least, of the mass of all tokens that are left to it."""
    return p * (1 - _SLACK) * total


def needed_of_equals(missing: Float[Array, " slot"], weight: Float[Array, " slot"]) -> Int[Array, " slot"]:
    """Return how many tokens of equal score top-p keeps of those with the least score kept.

    Args:
        missing: The mass that the tokens of higher score fall short of.
        each: The weight of one of these tokens.
    """
    return jnp.clip(jnp.ceil(missing / jnp.where(weight > 0, weight, 1.0)), 1, 2.0**30).astype(jnp.int32)


def top_k(candidates: Candidates, threshold: TokenThreshold, k: Int[Array, " slot"]) -> TokenThreshold:
    """Keep the ``k`` largest scores of each slot, all where ``k`` is 0; the first filter, so ``threshold`` keeps all.

    Top-k sampling (Fan et al. 2018, https://arxiv.org/abs/1805.04833).
    """
    del threshold
    bits = jax.lax.optimization_barrier(candidates.bits)  # else each step of the bisection computes them again

    def count(chosen: Array) -> Array:
        return jnp.sum(chosen, axis=1, dtype=jnp.int32)

    least = _largest_bound(lambda bound: count(bits >= bound[:, None]) >= k, k.shape[0])
    equal = bits == least[:, None]
    last = _nth_id(equal, k - count(bits > least[:, None]), candidates.ids)
    every = keep_all(k.shape[0])
    return TokenThreshold(jnp.where(k > 0, least, every.least), jnp.where(k > 0, last, every.last))


def top_p(candidates: Candidates, threshold: TokenThreshold, p: Float[Array, " slot"]) -> TokenThreshold:
    """Keep the smallest prefix of what is kept with at least ``p`` of its probability; all of it where ``p`` is 1.

    Nucleus sampling (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751, eq. 2 and 3).
    """
    kept = threshold.mask(candidates)
    largest = jnp.max(candidates.scores, axis=1)[:, None]
    weight = jnp.where(kept, jnp.exp(candidates.scores - largest), 0.0)
    bits, weight = jax.lax.optimization_barrier((candidates.bits, weight))

    def mass(chosen: Array) -> Array:
        return mass_of(sum_limbs(jnp.where(chosen, weight, 0.0)))

    target = needed_mass(p, mass(kept))
    # Sums in float32 nearly always lead to the right token, which two exact sums prove.
    guess = _largest_bound(
        lambda bound: jnp.sum(jnp.where(bits >= bound[:, None], weight, 0.0), axis=1) >= target, p.shape[0]
    )
    right = (mass(bits >= guess[:, None]) >= target) & (mass(bits > guess[:, None]) < target)
    least = jax.lax.cond(
        jnp.all(right | (p == 1)),
        lambda: guess,
        lambda: _largest_bound(lambda bound: mass(bits >= bound[:, None]) >= target, p.shape[0]),
    )
    equal = kept & (bits == least[:, None])
    least_weight = jnp.max(jnp.where(equal, weight, 0.0), axis=1)
    needed = needed_of_equals(target - mass(bits > least[:, None]), least_weight)
    last = _nth_id(equal, needed, candidates.ids)
    last = jnp.where(least == threshold.least, jnp.minimum(last, threshold.last), last)
    return TokenThreshold(jnp.where(p < 1, least, threshold.least), jnp.where(p < 1, last, threshold.last))


def min_p(candidates: Candidates, threshold: TokenThreshold, log_min_p: Float[Array, " slot"]) -> TokenThreshold:
    """Keep of what is kept the tokens at least ``exp(log_min_p)`` times as probable as the most probable one.

    Min-p sampling (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082, section 3).
    """
    near = candidates.scores - jnp.max(candidates.scores, axis=1)[:, None] >= log_min_p[:, None]
    least = jnp.min(jnp.where(near, candidates.bits, jnp.uint32(0xFFFFFFFF)), axis=1)
    tighter = (log_min_p > -jnp.inf) & (least > threshold.least)
    return TokenThreshold(jnp.where(tighter, least, threshold.least), jnp.where(tighter, _ALL_IDS, threshold.last))


FILTERS = (
    Filter(name="top_k", parameter="top_k", narrows=lambda k: k > 0, apply=top_k),
    Filter(name="top_p", parameter="top_p", narrows=lambda p: p < 1, apply=top_p),
    Filter(name="min_p", parameter="log_min_p", narrows=lambda log_min_p: log_min_p > -jnp.inf, apply=min_p),
)
"""The filters in the order in which they are applied."""

assert (*(each.name for each in FILTERS), "filters") == SamplingParams.FILTERS, "a request would not know its filters"


def top_n_sigma(scores: Float[Array, "slot token"], n: Float[Array, " slot"]) -> Float[Array, " slot"]:
    """Scores within ``n`` standard deviations of the largest (Tang et al. 2024, https://arxiv.org/abs/2411.07641)."""
    return jnp.max(scores, axis=1) - n * jnp.std(scores, axis=1, where=jnp.isfinite(scores))


class NamedFilter(NamedTuple):
    """A filter that ships, for the key ``filters``."""

    least_score: Callable[[Array, Array], Array]
    """The function, see `find_filter`."""
    lowest: float
    """The least value that it takes."""
    highest: float = math.inf
    """The largest value that it takes."""


NAMED: Final[Mapping[str, NamedFilter]] = {"top_n_sigma": NamedFilter(top_n_sigma, lowest=0.0)}
"""The filters that the key ``filters`` knows without a module, such as ``top_n_sigma=1.5``."""


def check_named_filters(values: Mapping[str, float]) -> None:
    """Check the filters that ship; a module of the user's is not imported.

    Args:
        values: The value of each of ``filters``.

    Raises:
        ConfigError: There is none of a name, or its value is out of its range.
    """
    for name, value in values.items():
        if ":" in name:
            continue
        if name not in NAMED:
            raise ConfigError(f"filters has {name!r}; it must be {', '.join(NAMED)}, or module:function of your own.")
        if not NAMED[name].lowest <= value <= NAMED[name].highest:
            most = "" if math.isinf(NAMED[name].highest) else f" and at most {NAMED[name].highest:g}"
            raise ConfigError(
                f"filters has {name}={value:g}; it must be at least {NAMED[name].lowest:g}{most}. Change it."
            )


def check_filters_of(place: str, params: Iterable[SamplingParams], filters: Collection[str]) -> None:
    """Refuse requests of another process that would have a module imported.

    Args:
        place: The message that they come in.
        filters: The value of the key ``filters`` of this host's own configuration.

    Raises:
        HostError: A request has a filter of a module that the configuration does not name.
    """
    own = {text.rpartition("=")[0] for text in filters}
    for name in sorted({name for rules in params for name in rules.filter_values()} - own):
        if ":" in name:
            raise HostError(
                f"{place} has the filter {printable(name)!r}, which the configuration of this host does not name: its "
                "module is not imported. Start every process with the same configuration; if that is so, somebody else "
                "has written to the coordination service (docs/security.md)."
            )


@functools.cache
def find_filter(name: str) -> Filter:
    """Return a filter of the key ``filters``: a function of scores ``[slot, token]`` and values ``[slot]``.

    It returns the least score ``[slot]`` that is drawn from, in float32. Scores are logits after temperature and the
    filters before, -inf for what is ruled out; the most probable token is always kept.

    Args:
        name: A name in `NAMED`, or ``module:function``, which is imported.

    Raises:
        ConfigError: There is no such module, or no such function in it.
    """
    least_score = NAMED[name].least_score if name in NAMED else load_object(name, "filter")

    def apply(candidates: Candidates, threshold: TokenThreshold, values: Array) -> TokenThreshold:
        kept = jnp.where(threshold.mask(candidates), candidates.scores, -jnp.inf)
        bound = jnp.minimum(least_score(kept, values), jnp.max(kept, axis=1)).astype(jnp.float32)
        least = sortable_bits(bound[:, None])[:, 0]
        # A least score that is nan keeps what is kept, as values of slots without this filter are nan.
        tighter = ~jnp.isnan(values) & ~jnp.isnan(bound) & (least > threshold.least)
        return TokenThreshold(jnp.where(tighter, least, threshold.least), jnp.where(tighter, _ALL_IDS, threshold.last))

    return Filter(name=name, parameter="more_filters", narrows=lambda values: ~jnp.isnan(values), apply=apply)


def filters_of(names: Iterable[str]) -> list[Filter]:
    """Return filters by their names, in the order in which they are applied: `FILTERS`, then others by name."""
    names = set(names)
    own = sorted(names - {filter_.name for filter_ in FILTERS})
    return [*(filter_ for filter_ in FILTERS if filter_.name in names), *map(find_filter, own)]


def _largest_bound(enough: Callable[[Array], Array], slots: int) -> UInt[Array, " slot"]:
    """The largest bound of each slot that is ``enough``, 0 where none is; whatever is below such a bound is one too."""

    def bit(i: Array, bound: Array) -> Array:
        larger = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(larger), larger, bound)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(slots, jnp.uint32))


def _nth_id(
    chosen: Bool[Array, "slot token"], n: Int[Array, " slot"], ids: Int[Array, " token"]
) -> Int[Array, " slot"]:
    """The id of the ``n``-th chosen token of each slot, or the largest int32 where no more than ``n`` are chosen."""
    total = jnp.sum(chosen, axis=1, dtype=jnp.int32)

    def search(chosen: Array) -> Array:
        rank = jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
        return jnp.sum(jnp.where(chosen & (rank == n[:, None]), ids, 0), axis=1, dtype=jnp.int32)

    # Equal scores are rare.
    id_ = jax.lax.cond(jnp.any(total > n), search, lambda chosen: jnp.zeros_like(total), chosen)
    return jnp.where(total > n, id_, _ALL_IDS)
