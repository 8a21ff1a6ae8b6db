"""Which tokens may be drawn: the filters, on a vocabulary that is split over the devices of a replica."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lockstep.engine.sampling.filters import FILTERS, Candidates, Filter, TokenThreshold, filters_of, keep_all
from lockstep.engine.sampling.shortlist import Shortlist
from lockstep.placement import DecodeMesh

_ALL, _LISTED = "filters", "shortlist"
"""The scopes of the conditions around all filters, and around those that a short list decides."""

_WITH_LIST = FILTERS[:2]


def scopes_needed(filters: Mapping[str, bool]) -> dict[str, bool]:
    """Returns whether each condition around several filters holds, by its scope in a compiled program.

    Args:
        filters: Whether each filter is needed, by its name.
    """
    return {_ALL: any(filters.values()), _LISTED: any(filters[each.name] for each in _WITH_LIST)}


def find_threshold(
    scores: Float[Array, "slot local_vocab"],
    parameters: Mapping[str, Array],
    features: Mapping[str, Array],
    decode_mesh: DecodeMesh,
) -> TokenThreshold:
    """Applies the filters in order, inside ``shard_map``; two collectives, and none where no slot needs a filter.

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
        # XLA makes a list by sorting on TPU, which takes longer to compile, and there a pass over the vocabulary costs
        # little.
        with_list = decode_mesh.mesh.devices.flat[0].platform != "tpu"
        if tensor == 1:
            return _threshold(scores, parameters, features, with_list=with_list)
        share = -(-slots // tensor)
        # Where the slots do not divide, the last one fills up.
        scores = scores[jnp.minimum(jnp.arange(share * tensor), slots - 1)] if slots % tensor else scores
        scores = jax.lax.all_to_all(scores, decode_mesh.tensor_axes, split_axis=0, concat_axis=1, tiled=True)
        own = jax.lax.axis_index(decode_mesh.tensor_axes) * share + jnp.arange(share)
        own = jnp.minimum(own, slots - 1)
        own_parameters = {name: values[own] for name, values in parameters.items()}
        found = _threshold(scores, own_parameters, features, with_list=with_list)
        pair = jnp.stack([jax.lax.bitcast_convert_type(found.least, jnp.int32), found.last])
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

    def apply(each: Filter) -> Callable[[TokenThreshold], TokenThreshold]:
        return lambda threshold: each.apply(candidates, threshold, parameters[each.name])

    def search(threshold: TokenThreshold, filters: Sequence[Filter]) -> TokenThreshold:
        for each in filters:
            with jax.named_scope(each.name):
                threshold = jax.lax.cond(features[each.name], apply(each), lambda same: same, threshold)
        return threshold

    def listed(threshold: TokenThreshold) -> TokenThreshold:
        found, decided = Shortlist.of(candidates).threshold(candidates, parameters["top_k"], parameters["top_p"])
        # A true condition is what a plan counts, and what is nearly always the case.
        return jax.lax.cond(jnp.all(decided), lambda: found, lambda: search(threshold, _WITH_LIST))

    threshold, filters = keep_all(scores.shape[0]), filters_of(features)
    if not with_list:
        return search(threshold, filters)
    with jax.named_scope(_LISTED):
        threshold = jax.lax.cond(features["top_k"] | features["top_p"], listed, lambda same: same, threshold)
    return search(threshold, [each for each in filters if each not in _WITH_LIST])
