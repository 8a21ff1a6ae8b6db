"""Top-k and top-p from a short list of the most probable tokens, which nearly always decides what they keep."""

import math
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.engine.sampling.filters import (
    Candidates,
    TokenThreshold,
    keep_all,
    limbs_of,
    mass_of,
    needed_mass,
    needed_of_equals,
    sortable_bits,
    sum_limbs,
)

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
        found, entry = _top(within.reshape(len(scores), -1), SIZE)
        return cls(found, jnp.take_along_axis(best, entry // width, axis=1) * width + entry % width)

    def threshold(
        self, candidates: Candidates, k: Int[Array, " slot"], p: Float[Array, " slot"]
    ) -> tuple[TokenThreshold, Bool[Array, " slot"]]:
        """Applies `top_k`, then `top_p`, with the same result as the search over all tokens.

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
    found, places = jax.lax.top_k(numbers, size)
    return jax.lax.optimization_barrier(found), jax.lax.optimization_barrier(places)
