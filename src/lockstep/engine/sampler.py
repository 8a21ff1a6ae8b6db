"""From logits to tokens, with the features that the requests use and no others (the order is in `SamplingParams`)."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.engine.bias import allowed, biases, rule_out_stops
from lockstep.engine.penalties import Seen, add_token, penalise, seen_so_far
from lockstep.engine.sample import Draws, Sampled, Uses, first_id, sample, uses_of
from lockstep.placement.layout import DecodeGrid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """What one launch of the decode program knows of its slots; made anew while it is traced.

    Args:
        draws: temperature, filters and random words.
        uses: which of them are not neutral.
        given: the arrays of a `SamplingPlan`, this replica's entry alone.
        stop_ids: of each slot, padded with -1.
        bias: what is added to each logit, or None without a biased slot.
        allowed: which tokens may be sampled, or None without a slot that rules any out.
        first: token id that this device's part of the vocabulary starts with.
        grid: the decode grid.
    """

    draws: Draws
    uses: Uses
    given: Mapping[str, Array]
    stop_ids: Int[Array, "slot stop_ids"]
    bias: Float[Array, "slot local_vocab"] | None
    allowed: Bool[Array, "slot local_vocab"] | None
    first: Array | int
    grid: DecodeGrid

    def draw(
        self, logits: Float[Array, "slot local_vocab"], seen: Seen | None, position: Int[Array, " slot"]
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
        return sample(logits, shaped, self.draws, self.uses, position, self.grid)

    def count(self, seen: Seen | None, token: Int[Array, " slot"], active: Bool[Array, " slot"]) -> Seen | None:
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
    grid: DecodeGrid,
) -> tuple[Sampler, Seen | None]:
    """Prepares a launch, once and not at every step.

    Args:
        words: seed, prompt and generation of each slot.
        temperature: of each slot.
        stop_ids: of each slot, padded with -1.
        given: the arrays of a `SamplingPlan`, this replica's entry alone.
        active: slots that have something to sample.
        local_vocab: tokens of this device's part of the vocabulary.
        grid: the decode grid.

    Returns:
        The sampler, and the tokens that the launch starts with where there are penalties.
    """
    draws = Draws(words, temperature, given["top_k"], given["top_p"], given["log_min_p"])
    first = first_id(local_vocab, grid)
    seen = None
    if "history" in given:
        seen = seen_so_far(given["history"], given["prompt_length"], first, local_vocab)
    sampler = Sampler(
        draws=draws,
        uses=uses_of(draws, active, grid),
        given=given,
        stop_ids=stop_ids,
        bias=biases(given["bias_ids"], given["bias"], first, local_vocab) if "bias" in given else None,
        allowed=allowed(given["allowed_ids"], first, local_vocab) if "allowed_ids" in given else None,
        first=first,
        grid=grid,
    )
    return sampler, seen
