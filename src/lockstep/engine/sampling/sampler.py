"""From logits to tokens, with the features that the requests use and no others; their order is in `SamplingParams`."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from lockstep.engine.sampling.filters import FILTERS, Candidates, filters_of
from lockstep.engine.sampling.logits_processors import (
    TokenCounts,
    add_token,
    allowed,
    biases,
    count_tokens,
    penalise,
    rule_out_stops,
)
from lockstep.engine.sampling.threshold import find_threshold, scopes_needed
from lockstep.placement import DecodeMesh
from lockstep.placement.device import add_blocks, barrier, blocks_of, elementwise, tree_sum
from lockstep.types import SamplingParams

_RUN = 128
"""Scores whose maximum is taken together when the largest of all is searched; a TPU's vector registers are as wide."""


class SamplingState(NamedTuple):
    """The inputs of each slot's draw besides logits and position; constant during a launch."""

    words: UInt[Array, "slot 3"]
    """The seed, the prompt number and the generation number."""
    temperature: Float[Array, " slot"]
    """The temperature; 0 is greedy."""
    filters: Mapping[str, Array]
    """The parameter ``[slot]`` of each of `FILTERS`, by the filter's name; empty where the program has none of them."""


class ActiveFeatures(NamedTuple):
    """Whether any slot of any replica needs a feature: the same on every device, because of the collectives inside.

    Each feature is a `jax.lax.cond` in a scope of its name, by which `plan` finds it in a compiled program; those of
    the filters are inside others (`scopes_needed`).
    """

    temperature: Bool[Array, ""]
    """Whether any slot draws at random."""
    filters: Mapping[str, Array]
    """Whether any slot needs the filter, by the filter's name; scalars."""


class Sampled(NamedTuple):
    """One token per slot, the same on every device of a replica."""

    token: Int[Array, " slot"]
    """The token id."""
    logprob: Float[Array, " slot"]
    """The token's log-probability under the model: temperature 1, nothing filtered."""
    sampled_logprob: Float[Array, " slot"]
    """The token's log-probability under the distribution that it was drawn from; 0 where the temperature is 0."""
    max_logit: Float[Array, " slot"]
    """The largest of the model's logits."""
    logsumexp: Float[Array, " slot"]
    """The log of the sum of ``exp(logits - max_logit)``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """The slots of one launch as the decode program sees them; made anew while it is traced."""

    state: SamplingState  # the temperature, the filters' parameters and the random words
    features: ActiveFeatures
    inputs: Mapping[str, Array]  # the arrays of a `DecodeBatch`, this replica's entry alone
    bias: Float[Array, "slot local_vocab"] | None  # what is added to each logit; None where no slot has a bias
    allowed: Bool[Array, "slot local_vocab"] | None  # which tokens may be sampled; None where no slot rules any out
    first: Array | int  # the first token id of this device's part of the vocabulary
    decode_mesh: DecodeMesh
    exact: bool = False  # whether sums over the vocabulary are those of `numerics: exact`

    def draw(
        self, logits: Float[Array, "slot local_vocab"], counts: TokenCounts | None, position: Int[Array, " slot"]
    ) -> Sampled:
        """Sample one token per slot.

        Args:
            logits: The model's own logits, this device's part of the vocabulary.
            counts: The tokens so far; None where no slot has penalties.
        """
        processed = logits
        if counts is not None:
            processed = penalise(processed, counts, self.inputs["penalties"])
        if self.bias is not None:
            processed = processed + self.bias
        if self.allowed is not None:
            processed = jnp.where(self.allowed, processed, -jnp.inf)
        if "stop_from" in self.inputs:
            early = position < self.inputs["stop_from"]
            processed = rule_out_stops(processed, self.inputs["stop_ids"], early, self.first)
        return sample(logits, processed, self.state, self.features, position, self.decode_mesh, exact=self.exact)

    def count(
        self, counts: TokenCounts | None, token: Int[Array, " slot"], active: Bool[Array, " slot"]
    ) -> TokenCounts | None:
        """Add the sampled tokens of active slots to ``counts``; None stays None."""
        return None if counts is None else add_token(counts, token, active, self.first)


def start_sampler(
    inputs: Mapping[str, Array],
    *,
    more_filters: Sequence[str] = (),
    local_vocab: int,
    decode_mesh: DecodeMesh,
    exact: bool = False,
    apart: bool = False,
) -> tuple[Sampler, TokenCounts | None]:
    """Compute what all steps of a launch share.

    Args:
        inputs: The arrays of a `DecodeBatch`, this replica's entry alone.
        more_filters: The names of the users' own filters, see `Capacity`.
        local_vocab: The number of tokens of this device's part of the vocabulary.
        apart: Whether each replica takes the steps of its own sequences alone.

    Returns:
        The sampler, and the tokens that the slots have at the start of the launch, or None where there are no
        penalties.
    """
    active = inputs["remaining"] > 0
    filters = {filter_.name: inputs[filter_.parameter] for filter_ in FILTERS if filter_.parameter in inputs}
    filters |= {name: inputs["more_filters"][:, at] for at, name in enumerate(more_filters)}
    state = SamplingState(inputs["draw"], inputs["temperature"], filters)
    first = first_id(local_vocab, decode_mesh)
    counts = None
    if "history" in inputs:
        counts = count_tokens(inputs["history"], inputs["prompt_length"], first, local_vocab)
    sampler = Sampler(
        state=state,
        features=active_features(state, active, () if apart else decode_mesh.replica_axes),
        inputs=inputs,
        bias=biases(inputs["bias_ids"], inputs["bias"], first, local_vocab) if "bias" in inputs else None,
        allowed=allowed(inputs["allowed_ids"], first, local_vocab) if "allowed_ids" in inputs else None,
        first=first,
        decode_mesh=decode_mesh,
        exact=exact,
    )
    return sampler, counts


def sample(
    logits: Float[Array, "slot local_vocab"],
    processed: Float[Array, "slot local_vocab"],
    state: SamplingState,
    features: ActiveFeatures,
    position: Int[Array, " slot"],
    decode_mesh: DecodeMesh,
    *,
    exact: bool = False,
) -> Sampled:
    """Sample one token per slot, inside ``shard_map``; greedy where the temperature is 0.

    A draw is the argmax of ``processed / temperature + Gumbel noise`` over what the filters keep (the "Gumbel-max
    trick": Gumbel 1954; Maddison et al. 2014, https://arxiv.org/abs/1411.0030). The noise depends on (seed, prompt,
    generation, position, token) alone. Ties go to the lowest token id.

    Args:
        logits: The model's own logits, this device's part of the vocabulary, float32; -inf for ids beyond the
            vocabulary.
        processed: The logits after penalties, bias, allowed tokens and early stops.
        decode_mesh: The decode mesh; the vocabulary is split over its tensor axes.
        exact: Whether sums over the vocabulary are those of ``numerics: exact``.
    """
    total = functools.partial(exact_sum_exp, decode_mesh=decode_mesh) if exact else _sum_exp
    size, rows, processed_is_logits = logits.shape[1], jnp.arange(logits.shape[0]), processed is logits
    first = first_id(size, decode_mesh)
    ids = first + jnp.arange(size)

    def whole_max(largest: Array) -> Array:
        return jax.lax.pmax(largest, decode_mesh.tensor_axes) if exact and decode_mesh.tensor > 1 else largest

    def draw(processed: Array) -> tuple[Array, ...]:
        random = state.temperature[:, None] > 0
        tempered = jnp.where(random, processed / jnp.where(random, state.temperature[:, None], 1.0), processed)
        tempered = barrier(tempered) if exact else tempered
        filtered = tempered
        if state.filters:
            threshold = find_threshold(tempered, state.filters, features.filters, decode_mesh)
            filtered = jnp.where(threshold.mask(Candidates.of(tempered, ids)), tempered, -jnp.inf)
        noise = jax.vmap(lambda words, at: gumbel_noise(words, at, ids))(state.words, position)
        scores = jnp.where(random, filtered + noise, processed)
        # Without the barrier the noise is computed again for each of its uses, in reductions that XLA does not
        # vectorise on CPU.
        filtered, scores = jax.lax.optimization_barrier((filtered, scores))
        largest, filtered_max = jnp.max(scores, axis=1), whole_max(jnp.max(filtered, axis=1))
        best = _first_hit(scores, largest)  # the noise takes so long that runs would save nothing
        return best, largest, filtered[rows, best], filtered_max, total(filtered, filtered_max)

    likeliest = first_largest(logits)

    def take_largest(processed: Array) -> tuple[Array, ...]:
        zeros = jnp.zeros(len(rows), processed.dtype)
        return *(likeliest if processed_is_logits else first_largest(processed)), zeros, zeros, zeros

    with jax.named_scope("temperature"):
        best, *scores = jax.lax.cond(features.temperature, draw, take_largest, processed)
    max_logit = whole_max(likeliest[1])
    token, own = first + best, jnp.stack([*scores, logits[rows, best], max_logit, total(logits, max_logit)])
    numbers: Iterable[Array] = own
    if decode_mesh.tensor > 1:
        token, numbers = _of_winner(token, own, decode_mesh, exact)
    _, drawn, drawn_max, drawn_sum_exp, logit, max_logit, sum_exp = numbers
    if exact:
        logit, max_logit, sum_exp, drawn, drawn_max = barrier((logit, max_logit, sum_exp, drawn, drawn_max))
        drawn_sum_exp = barrier(drawn_sum_exp)
    log = exact_log if exact else jnp.log
    logsumexp = log(sum_exp)
    sampled_logprob = jnp.where(state.temperature > 0, drawn - drawn_max - log(drawn_sum_exp), 0.0)
    return Sampled(token, logit - max_logit - logsumexp, sampled_logprob, max_logit, logsumexp)


def _of_winner(token: Array, own: Array, decode_mesh: DecodeMesh, exact: bool) -> tuple[Array, Iterable[Array]]:
    """The token of the part of the vocabulary with the best score, and its numbers, with the sums of all parts."""
    rows = jnp.arange(len(token))
    tokens = jax.lax.all_gather(token, decode_mesh.tensor_axes)
    # [number, part, slot]; parts in order of token id
    parts = jax.lax.all_gather(own, decode_mesh.tensor_axes, axis=1)
    winner = jnp.argmax(parts[0], axis=0)
    token, numbers = tokens[winner, rows], parts[:, winner, rows]
    if exact:  # whose maxima and sums are those of all parts already
        return token, numbers
    return token, (*numbers[:2], *_join(parts[2], parts[3]), numbers[4], *_join(parts[5], parts[6]))


def active_features(state: SamplingState, active: Bool[Array, " slot"], replica_axes: Sequence[str]) -> ActiveFeatures:
    """Return the features that any active slot needs.

    Args:
        replica_axes: The mesh axes of replicas that take their steps together, and have the same features for it: one
            collective; none for a replica alone.
    """
    random = active & (state.temperature > 0)
    filters = filters_of(state.filters)
    needs = [random, *(random & filter_.narrows(state.filters[filter_.name]) for filter_ in filters)]
    flags = jnp.stack([jnp.any(need) for need in needs]).astype(jnp.int32)
    if replica_axes:
        flags = jax.lax.pmax(flags, tuple(replica_axes))
    temperature, *needed = flags > 0
    return ActiveFeatures(temperature, {filter_.name: flag for filter_, flag in zip(filters, needed, strict=True)})


def never_used(requested: Iterable[SamplingParams]) -> frozenset[str]:
    """Return the scopes of the features (`ActiveFeatures`) that no step of such requests needs."""
    random = [params for params in requested if params.temperature > 0]
    names = {*(filter_.name for filter_ in FILTERS), *(name for params in random for name in params.own_filters())}
    filters = {filter_.name: any(map(filter_.is_requested, random)) for filter_ in filters_of(names)}
    needs = {"temperature": bool(random), **filters, **scopes_needed(filters)}
    return frozenset(name for name, needed in needs.items() if not needed)


def first_largest(scores: Float[Array, "slot token"]) -> tuple[Int[Array, " slot"], Float[Array, " slot"]]:
    """Return the index of each row's maximum, the first of equal ones, and the maximum; with NaN, some index.

    It is `jax.numpy.argmax`, which XLA does not vectorise on CPU, in plain reductions, of which one goes over all
    scores where they divide into runs: the maximum of each run. Then the first run that has the maximum is searched.
    """
    rows, size = scores.shape
    if size % _RUN:
        largest = jnp.max(scores, axis=1)
        return _first_hit(scores, largest), largest
    runs = scores.reshape(rows, -1, _RUN)
    # Without the barrier XLA takes the largest of all scores in a second pass over them.
    maxima = jax.lax.optimization_barrier(jnp.max(runs, axis=2))
    largest = jnp.max(maxima, axis=1)
    run = _first_hit(maxima, largest)
    within = jnp.take_along_axis(runs, run[:, None, None], axis=1)[:, 0]
    return run * _RUN + _first_hit(within, largest), largest


def _first_hit(scores: Array, largest: Array) -> Array:
    """The index of each row's first score that is its ``largest`` or NaN."""
    hit = (scores == largest[:, None]) | jnp.isnan(scores)
    return jnp.min(jnp.where(hit, jnp.arange(scores.shape[1]), scores.shape[1]), axis=1)


def first_id(size: int, decode_mesh: DecodeMesh) -> Array | int:
    """Return the first token id of this device's part of the vocabulary.

    Args:
        size: The number of tokens of a part.
    """
    return jax.lax.axis_index(decode_mesh.tensor_axes) * size if decode_mesh.tensor > 1 else 0


def _sum_exp(logits: Array, largest: Array) -> Array:
    """Each row's sum of ``exp(logits - largest)``, where ``largest`` is the row's maximum."""
    return jnp.sum(jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0.0)[:, None]), axis=1)


def exact_log(x: Array) -> Array:
    """The logarithm, with whose last operation XLA joins nothing."""
    return elementwise(jnp.log, x)


def exact_sum_exp(logits: Array, largest: Array, decode_mesh: DecodeMesh) -> Array:
    """Each row's sum of ``exp(logits - largest)`` over the whole vocabulary, block by block.

    Args:
        largest: The maximum over all of it.
    """
    shifted = elementwise(jnp.exp, logits - jnp.where(jnp.isfinite(largest), largest, 0.0)[:, None])
    blocks = blocks_of(logits.shape[1] * decode_mesh.tensor) // decode_mesh.tensor
    part = add_blocks(tree_sum(shifted.reshape(len(logits), blocks, -1)).T)
    return add_blocks(jax.lax.all_gather(part, decode_mesh.tensor_axes)) if decode_mesh.tensor > 1 else part


def _join(maxima: Array, sums_exp: Array) -> tuple[Array, Array]:
    """The maximum of all parts of the vocabulary, and the sum_exp relative to it."""
    largest = jnp.max(maxima, axis=0)
    return largest, jnp.sum(jnp.where(jnp.isfinite(maxima), sums_exp * jnp.exp(maxima - largest), 0.0), axis=0)


_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY: Final = 0x1BD11BDA


def gumbel_noise(
    words: UInt[Array, " 3"], position: Int[Array, ""], ids: Int[Array, " token"]
) -> Float[Array, " token"]:
    """Return the noise of a slot for each token id, the same wherever and in whatever batch it is computed.

    Args:
        words: The seed, the prompt number and the generation number.
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
    """Return the first word of `jax.random.fold_in` of each number, all 20 rounds in one expression.

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
