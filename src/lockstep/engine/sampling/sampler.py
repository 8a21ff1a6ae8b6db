"""From logits to tokens, with the features that the requests use and no others (the order is in `SamplingParams`)."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from lockstep.engine.sampling.filters import TokenThreshold, keep_all, min_p, sortable_bits, top_k, top_p
from lockstep.engine.sampling.logits_processors import (
    TokenCounts,
    add_token,
    allowed,
    biases,
    count_tokens,
    penalise,
    rule_out_stops,
)
from lockstep.placement import DecodeMesh
from lockstep.types import SamplingParams


class SamplingState(NamedTuple):
    """How each slot's token is drawn."""

    words: UInt[Array, "slot 3"]
    """Seed, prompt number, generation number."""
    temperature: Float[Array, " slot"]
    """0 is greedy."""
    top_k: Int[Array, " slot"]
    """0 keeps all tokens."""
    top_p: Float[Array, " slot"]
    """1 keeps all tokens."""
    log_min_p: Float[Array, " slot"]
    """-inf keeps all tokens."""


class ActiveFeatures(NamedTuple):
    """What any slot of any replica needs: the same on every device, for there are collectives in what depends on it.

    What depends on a field is a `jax.lax.cond` in a scope of the field's name, by which `plan` finds it in the program.
    """

    temperature: Bool[Array, ""]
    top_k: Bool[Array, ""]
    top_p: Bool[Array, ""]
    min_p: Bool[Array, ""]


class Sampled(NamedTuple):
    """One token per slot, the same on every device of a replica."""

    token: Int[Array, " slot"]
    logprob: Float[Array, " slot"]
    """Under the model: temperature 1, nothing filtered."""
    sampled_logprob: Float[Array, " slot"]
    """Under the distribution that it was drawn from; 0 where the temperature is 0."""
    top: Float[Array, " slot"]
    """The largest of the model's logits."""
    logsumexp: Float[Array, " slot"]
    """Log of the sum of ``exp(logits - top)``."""


def never_used(requested: Iterable[SamplingParams]) -> frozenset[str]:
    """The fields of `ActiveFeatures` that are false at every step of such requests."""
    hot = [params for params in requested if params.temperature > 0]
    needs = {
        "temperature": bool(hot),
        "top_k": any(params.top_k is not None for params in hot),
        "top_p": any(params.top_p < 1 for params in hot),
        "min_p": any(params.min_p > 0 for params in hot),
    }
    return frozenset(name for name in ActiveFeatures._fields if not needs[name])


def active_features(draws: SamplingState, active: Bool[Array, " slot"], decode_mesh: DecodeMesh) -> ActiveFeatures:
    """What the active slots of all replicas need; one collective."""
    hot = active & (draws.temperature > 0)
    needs = [hot, hot & (draws.top_k > 0), hot & (draws.top_p < 1), hot & (draws.log_min_p > -jnp.inf)]
    flags = jnp.stack([jnp.any(need) for need in needs]).astype(jnp.int32)
    if decode_mesh.replica_axes:
        flags = jax.lax.pmax(flags, decode_mesh.replica_axes)
    return ActiveFeatures(*(flags > 0))


def sample(
    logits: Float[Array, "slot local_vocab"],
    shaped: Float[Array, "slot local_vocab"],
    draws: SamplingState,
    uses: ActiveFeatures,
    position: Int[Array, " slot"],
    decode_mesh: DecodeMesh,
) -> Sampled:
    """Samples one token per slot, inside ``shard_map``; greedy where the temperature is 0.

    A draw is the argmax of ``shaped / temperature + Gumbel noise`` (Gumbel 1954; the "Gumbel-max trick") over what the
    filters keep, with noise that depends on (seed, prompt, generation, position, token) alone. Ties go to the lowest
    token id.

    Args:
        logits: this device's part of the vocabulary, float32, -inf where a token is not allowed: the model's own.
        shaped: the same after penalties and bias.
        draws: parameters per slot.
        uses: which of them are not neutral.
        position: position of the token to sample.
        decode_mesh: the decode mesh; the vocabulary is split over its tensor axes.
    """
    size, rows = logits.shape[1], jnp.arange(logits.shape[0])
    first = first_id(size, decode_mesh)
    ids = first + jnp.arange(size)

    def draw(shaped: Array) -> tuple[Array, ...]:
        hot = draws.temperature[:, None] > 0
        tempered = jnp.where(hot, shaped / jnp.where(hot, draws.temperature[:, None], 1.0), shaped)
        image = sortable_bits(tempered)
        kept = _filter(tempered, image, draws, uses, ids, decode_mesh)
        inside = jnp.where(kept.mask(image, ids), tempered, -jnp.inf)
        noise = jax.vmap(lambda words, at: _gumbel(words, at, ids))(draws.words, position)
        scores = jnp.where(hot, inside + noise, shaped)
        # Else the noise is made again for each of its uses, inside reductions that the CPU does not vectorise.
        inside, scores = jax.lax.optimization_barrier((inside, scores))
        best, largest = first_largest(scores)
        return best, largest, inside[rows, best], *_max_and_sum_exp(inside)

    def take_largest(shaped: Array) -> tuple[Array, ...]:
        zeros = jnp.zeros(len(rows), shaped.dtype)
        return *first_largest(shaped), zeros, zeros, zeros

    with jax.named_scope("temperature"):
        best, *scores = jax.lax.cond(uses.temperature, draw, take_largest, shaped)
    token, own = first + best, jnp.stack([*scores, logits[rows, best], *_max_and_sum_exp(logits)])
    if decode_mesh.tensor > 1:
        tokens = jax.lax.all_gather(token, decode_mesh.tensor_axes)
        parts = jax.lax.all_gather(
            own, decode_mesh.tensor_axes, axis=1
        )  # [number, part, slot]; parts in order of token id
        winner = jnp.argmax(parts[0], axis=0)
        token, parts_of_winner = tokens[winner, rows], parts[:, winner, rows]
        drawn, drawn_top, drawn_sum_exp = parts_of_winner[1], *_join(parts[2], parts[3])
        raw, top, sum_exp = parts_of_winner[4], *_join(parts[5], parts[6])
    else:
        _, drawn, drawn_top, drawn_sum_exp, raw, top, sum_exp = own
    logsumexp = jnp.log(sum_exp)
    sampled_logprob = jnp.where(draws.temperature > 0, drawn - drawn_top - jnp.log(drawn_sum_exp), 0.0)
    return Sampled(token, raw - top - logsumexp, sampled_logprob, top, logsumexp)


def first_largest(scores: Float[Array, "slot token"]) -> tuple[Int[Array, " slot"], Float[Array, " slot"]]:
    """Where each row is largest, the first of equals, and how large; NaN counts as largest, as in `jax.numpy.argmax`.

    Two plain reductions: the one over pairs that argmax becomes is not vectorised on CPUs and takes four times as long.
    """
    largest = jnp.max(scores, axis=1)
    hit = (scores == largest[:, None]) | jnp.isnan(scores)
    return jnp.min(jnp.where(hit, jnp.arange(scores.shape[1]), scores.shape[1]), axis=1), largest


def first_id(size: int, decode_mesh: DecodeMesh) -> Array | int:
    """The first token id of this device's part of the vocabulary.

    Args:
        size: of a part.
        decode_mesh: the decode mesh.
    """
    return jax.lax.axis_index(decode_mesh.tensor_axes) * size if decode_mesh.tensor > 1 else 0


def _filter(
    scores: Array, image: Array, draws: SamplingState, uses: ActiveFeatures, ids: Array, decode_mesh: DecodeMesh
) -> TokenThreshold:
    """Top-k, then top-p of what it left, then min-p, each only where a slot needs it."""

    def filter_if(
        name: str, narrow: Callable[[TokenThreshold], TokenThreshold], kept: TokenThreshold
    ) -> TokenThreshold:
        with jax.named_scope(name):
            return jax.lax.cond(getattr(uses, name), narrow, lambda kept: kept, kept)

    kept = filter_if("top_k", lambda kept: top_k(image, draws.top_k, ids, decode_mesh), keep_all(scores.shape[0]))
    kept = filter_if("top_p", lambda kept: top_p(scores, image, kept, draws.top_p, ids, decode_mesh), kept)
    return filter_if("min_p", lambda kept: min_p(scores, image, kept, draws.log_min_p, decode_mesh), kept)


def _max_and_sum_exp(logits: Array) -> tuple[Array, Array]:
    top = jnp.max(logits, axis=1)
    return top, jnp.sum(jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0)[:, None]), axis=1)


def _join(tops: Array, sums_exp: Array) -> tuple[Array, Array]:
    """The largest logit and the sum_exp relative to it, of all parts together."""
    top = jnp.max(tops, axis=0)
    return top, jnp.sum(jnp.where(jnp.isfinite(tops), sums_exp * jnp.exp(tops - top), 0.0), axis=0)


def _gumbel(words: Array, position: Array, ids: Array) -> Array:
    seed, prompt, generation = words
    key = jax.random.key(seed, impl="threefry2x32")
    for part in (prompt, generation, position):
        key = jax.random.fold_in(key, part)
    # One key per token id, not one array of noise: a device draws its own part of the vocabulary and nothing else.
    bits = jax.vmap(lambda token: jax.random.key_data(jax.random.fold_in(key, token))[0])(ids)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """What one launch of the decode program knows of its slots; made anew while it is traced.

    Args:
        draws: temperature, filters and random words.
        uses: which of them are not neutral.
        given: the arrays of a `SamplingBatch`, this replica's entry alone.
        stop_ids: of each slot, padded with -1.
        bias: what is added to each logit, or None without a biased slot.
        allowed: which tokens may be sampled, or None without a slot that rules any out.
        first: token id that this device's part of the vocabulary starts with.
        decode_mesh: the decode mesh.
    """

    draws: SamplingState
    uses: ActiveFeatures
    given: Mapping[str, Array]
    stop_ids: Int[Array, "slot stop_ids"]
    bias: Float[Array, "slot local_vocab"] | None
    allowed: Bool[Array, "slot local_vocab"] | None
    first: Array | int
    decode_mesh: DecodeMesh

    def draw(
        self, logits: Float[Array, "slot local_vocab"], seen: TokenCounts | None, position: Int[Array, " slot"]
    ) -> Sampled:
        """Samples the token at ``position`` of each slot.

        Args:
            logits: the model's own, this device's part.
            seen: tokens so far, where there are penalties.
            position: of the token to sample.
        """
        shaped = logits
        if seen is not None:
            shaped = penalise(shaped, seen, self.given["penalties"])
        if self.bias is not None:
            shaped = shaped + self.bias
        if self.allowed is not None:
            shaped = jnp.where(self.allowed, shaped, -jnp.inf)
        if "stop_from" in self.given:
            shaped = rule_out_stops(shaped, self.stop_ids, position < self.given["stop_from"], self.first)
        return sample(logits, shaped, self.draws, self.uses, position, self.decode_mesh)

    def count(
        self, seen: TokenCounts | None, token: Int[Array, " slot"], active: Bool[Array, " slot"]
    ) -> TokenCounts | None:
        """Adds the sampled tokens of active slots to ``seen``."""
        return None if seen is None else add_token(seen, token, active, self.first)


def start_sampler(
    words: Array,
    temperature: Array,
    stop_ids: Array,
    given: Mapping[str, Array],
    *,
    active: Array,
    local_vocab: int,
    decode_mesh: DecodeMesh,
) -> tuple[Sampler, TokenCounts | None]:
    """Prepares a launch, once and not at every step.

    Args:
        words: seed, prompt and generation of each slot.
        temperature: of each slot.
        stop_ids: of each slot, padded with -1.
        given: the arrays of a `SamplingBatch`, this replica's entry alone.
        active: slots that have something to sample.
        local_vocab: tokens of this device's part of the vocabulary.
        decode_mesh: the decode mesh.

    Returns:
        The sampler, and the tokens that the launch starts with where there are penalties.
    """
    draws = SamplingState(words, temperature, given["top_k"], given["top_p"], given["log_min_p"])
    first = first_id(local_vocab, decode_mesh)
    seen = None
    if "history" in given:
        seen = count_tokens(given["history"], given["prompt_length"], first, local_vocab)
    sampler = Sampler(
        draws=draws,
        uses=active_features(draws, active, decode_mesh),
        given=given,
        stop_ids=stop_ids,
        bias=biases(given["bias_ids"], given["bias"], first, local_vocab) if "bias" in given else None,
        allowed=allowed(given["allowed_ids"], first, local_vocab) if "allowed_ids" in given else None,
        first=first,
        decode_mesh=decode_mesh,
    )
    return sampler, seen
