"""The threshold of the filters, on a vocabulary that is split over the devices of a replica."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.engine.sampling.filters import (
    FILTERS,
    Candidates,
    Filter,
    TokenThreshold,
    filters_of,
    keep_all,
    limbs_of,
    mass_of,
    needed_mass,
    needed_of_equals,
    sortable_bits,
    sum_limbs,
)
from lockstep.placement import DecodeMesh
from lockstep.placement.device import platform_of

_ALL, _LISTED = "filters", "shortlist"
"""The scopes of the conditions around all filters, and around those that a short list decides."""

_WITH_LIST = FILTERS[:2]


def scopes_needed(filters: Mapping[str, bool]) -> dict[str, bool]:
    """Return whether each condition around several filters holds, by its scope in a compiled program."""
    return {_ALL: any(filters.values()), _LISTED: any(filters[filter_.name] for filter_ in _WITH_LIST)}


def find_threshold(
    scores: Float[Array, "slot local_vocab"],
    parameters: Mapping[str, Array],
    features: Mapping[str, Array],
    decode_mesh: DecodeMesh,
) -> TokenThreshold:
    """Apply the filters in order, inside ``shard_map``; two collectives, and none where no slot needs a filter.

    Each device filters its share of the slots over the whole vocabulary. So no step of a search needs another device,
    and devices and replicas may take different branches.

    Args:
        scores: The processed logits divided by the temperature, this device's part of the vocabulary.
        parameters: The parameter ``[slot]`` of each filter by its name.
        features: Whether any slot of any replica needs the filter, by the filter's name; scalars.
        decode_mesh: The decode mesh; the vocabulary is split over its tensor axes.

    Returns:
        The threshold of every slot, the same on every device of a replica.
    """

    def filtered(scores: Array) -> TokenThreshold:
        slots, tensor = scores.shape[0], decode_mesh.tensor
        with_list = not platform_of(decode_mesh.mesh.devices.flat[0].platform).sorts_lists
        if tensor == 1:
            return _threshold(scores, parameters, features, with_list=with_list)
        share = -(-slots // tensor)
        # Where the slots do not divide, the last one fills up.
        scores = scores[jnp.minimum(jnp.arange(share * tensor), slots - 1)] if slots % tensor else scores
        scores = jax.lax.all_to_all(scores, decode_mesh.tensor_axes, split_axis=0, concat_axis=1, tiled=True)
        own = jax.lax.axis_index(decode_mesh.tensor_axes) * share + jnp.arange(share)
        own = jnp.minimum(own, slots - 1)
        own_parameters = {name: values[own] for name, values in parameters.items()}
        threshold = _threshold(scores, own_parameters, features, with_list=with_list)
        pair = jnp.stack([jax.lax.bitcast_convert_type(threshold.least, jnp.int32), threshold.last])
        least, last = jax.lax.all_gather(pair, decode_mesh.tensor_axes, axis=1, tiled=True)[:, :slots]
        return TokenThreshold(jax.lax.bitcast_convert_type(least, jnp.uint32), last)

    needed = jnp.any(jnp.stack(list(features.values())))
    with jax.named_scope(_ALL):
        return jax.lax.cond(needed, filtered, lambda scores: keep_all(scores.shape[0]), scores)


def _threshold(
    scores: Float[Array, "slot vocab"],
    parameters: Mapping[str, Array],
    features: Mapping[str, Array],
    *,
    with_list: bool,
) -> TokenThreshold:
    """The threshold of each slot, from all of its scores."""
    candidates = Candidates.of(scores, jnp.arange(scores.shape[1], dtype=jnp.int32))

    def apply(filter_: Filter) -> Callable[[TokenThreshold], TokenThreshold]:
        return lambda threshold: filter_.apply(candidates, threshold, parameters[filter_.name])

    def search(threshold: TokenThreshold, filters: Sequence[Filter]) -> TokenThreshold:
        for filter_ in filters:
            with jax.named_scope(filter_.name):
                threshold = jax.lax.cond(features[filter_.name], apply(filter_), lambda same: same, threshold)
        return threshold

    def listed(threshold: TokenThreshold) -> TokenThreshold:
        from_list, decided = Shortlist.of(candidates).threshold(candidates, parameters["top_k"], parameters["top_p"])
        # A true condition is what a plan counts, and what is nearly always the case.
        return jax.lax.cond(jnp.all(decided), lambda: from_list, lambda: search(threshold, _WITH_LIST))

    threshold, filters = keep_all(scores.shape[0]), filters_of(features)
    if not with_list:
        return search(threshold, filters)
    with jax.named_scope(_LISTED):
        threshold = jax.lax.cond(features["top_k"] | features["top_p"], listed, lambda same: same, threshold)
    return search(threshold, [filter_ for filter_ in filters if filter_ not in _WITH_LIST])


SIZE: Final = 128
"""Entries of a short list."""


class Shortlist(NamedTuple):
    """The first tokens of each slot in the order of the filters: score descending, token id ascending."""

    scores: Float[Array, "slot entry"]
    """The scores; the first is the largest of the vocabulary."""
    ids: Int[Array, "slot entry"]
    """The token ids."""

    @classmethod
    def of(cls, candidates: Candidates) -> "Shortlist":
        """The short list of a whole vocabulary, or all of it where it is small."""
        # lax.top_k takes the first of equal numbers, but it puts -0 after 0, which are equal here.
        scores = jnp.where(candidates.scores == 0, 0.0, candidates.scores)
        vocab = scores.shape[1]
        width = 1 << round(math.log2(vocab / SIZE) / 2) if vocab > 16 * SIZE else 1
        if width == 1:
            return cls(*_top(scores, min(vocab, SIZE)))
        # A token of the list is in one of the SIZE runs of ids with the largest maxima: each of these has a token
        # before it. Together the two lists are searched in 2 sqrt(SIZE * vocab) numbers, in place of vocab.
        runs = jnp.pad(scores, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf).reshape(len(scores), -1, width)
        _, best = _top(jnp.max(runs, axis=2), SIZE)
        best = jnp.sort(best, axis=1)  # of equal numbers the least id comes first
        within = jnp.take_along_axis(runs, best[:, :, None], axis=1)
        largest, entry = _top(within.reshape(len(scores), -1), SIZE)
        return cls(largest, jnp.take_along_axis(best, entry // width, axis=1) * width + entry % width)

    def threshold(
        self, candidates: Candidates, k: Int[Array, " slot"], p: Float[Array, " slot"]
    ) -> tuple[TokenThreshold, Bool[Array, " slot"]]:
        """Apply `top_k`, then `top_p`, with the same result as the search over all tokens.

        Args:
            candidates: All tokens of the vocabulary.
            k: The number of tokens that top-k keeps; 0 keeps all.
            p: The share of the probability that top-p keeps; 1 keeps all.

        Returns:
            The threshold, and whether the list decides it: where it does not, the list ends too early, and the
            threshold is of no use.
        """
        size, vocab = self.scores.shape[1], candidates.scores.shape[1]
        entry, bits = jnp.arange(size), sortable_bits(self.scores)
        limit = jnp.where(k > 0, jnp.minimum(k, vocab), vocab)  # tokens that top-k keeps
        listed = limit <= size

        def weigh(scores: Array) -> Array:
            return jnp.exp(scores - self.scores[:, :1])

        def sums_of_all() -> Array:
            return sum_limbs(weigh(candidates.scores))

        weight = jnp.where(entry < limit[:, None], weigh(self.scores), 0.0)
        sums = jnp.cumsum(jnp.stack(limbs_of(weight)), axis=2)
        every = (p < 1) & ~listed
        rest = jax.lax.cond(jnp.any(every), sums_of_all, lambda: sums[:, :, -1])
        target = needed_mass(p, mass_of(jnp.where(listed, sums[:, :, -1], rest)))
        mass = mass_of(sums)
        reached = mass >= target[:, None]
        first = jnp.argmax(reached, axis=1)[:, None]

        def at_first(values: Array) -> Array:
            return jnp.take_along_axis(values, first, axis=1)

        # Top-p keeps as many tokens of equal score as it needs.
        start = jnp.sum(bits > at_first(bits), axis=1)
        end = jnp.minimum(jnp.sum(bits >= at_first(bits), axis=1), limit)
        before = jnp.take_along_axis(mass, jnp.maximum(start - 1, 0)[:, None], axis=1)[:, 0]
        missing = target - jnp.where(start > 0, before, 0.0)
        nucleus = start + needed_of_equals(missing, at_first(weight)[:, 0])
        ends = listed | (nucleus <= size) | (end < size)  # else there may be more of that score beyond the list
        count = jnp.where(p < 1, jnp.minimum(nucleus, end), limit)
        whole = (p == 1) & (limit == vocab)
        decided = whole | jnp.where(p < 1, (listed | (limit == vocab)) & reached[:, -1] & ends, listed)

        def last_of(values: Array) -> Array:
            return jnp.take_along_axis(values, jnp.clip(count - 1, 0, size - 1)[:, None], axis=1)[:, 0]

        all_tokens = keep_all(len(k))
        threshold = TokenThreshold(
            jnp.where(whole, all_tokens.least, last_of(bits)), jnp.where(whole, all_tokens.last, last_of(self.ids))
        )
        return threshold, decided


def _top(
    numbers: Float[Array, "slot number"], size: int
) -> tuple[Float[Array, "slot entry"], Int[Array, "slot entry"]]:
    """The largest numbers and where they are, the first of equal ones first."""
    # Where a slice of the result is used, XLA sorts all numbers on CPU, which takes 50 times as long; the barriers hide
    # that. One barrier for both ends the compiler where the list is the whole vocabulary.
    largest, places = jax.lax.top_k(numbers, size)
    return jax.lax.optimization_barrier(largest), jax.lax.optimization_barrier(places)
