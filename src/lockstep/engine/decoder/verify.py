"""The verify program: steps of decode that run many positions of each sequence, as far as a draft may be right.

A draw depends on (seed, prompt, generation, position, token) and the logits alone. So what decode would sample after
each token of a draft is known from one pass over all of them, and the draft is right up to the first token that is not
what was sampled there. Nothing is accepted by probability, and no distribution is corrected: the tokens are those of
decode. Speculative decoding otherwise: Leviathan et al. 2022, https://arxiv.org/abs/2211.17192.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.engine.decoder.decode import empty_results, launch_program, launch_sampler, sampled_parts
from lockstep.engine.decoder.transformer import Past, Sequences, Transformer
from lockstep.engine.sampling.logits_processors import TokenCounts
from lockstep.engine.sampling.sampler import Sampler
from lockstep.engine.schedule import NULL_PAGE, Capacity, VerifyBatch
from lockstep.models import DecoderWeights
from lockstep.models.attention import Attention

_ROWS_AT_ONCE = 256
"""Rows of logits that are computed together where there are few sequences: beyond so many, reading the output layer
once more costs little beside the products with it, and the logits take memory."""
_LEAST_AT_ONCE = 8
"""Positions of each sequence whose logits are computed together at least."""


def logits_at_once(slots: int, width: int) -> int:
    """Return the number of positions of each sequence whose logits are computed together: the output layer is read
    once for so many.
    """
    groups = -(-width // max(_LEAST_AT_ONCE, _ROWS_AT_ONCE // slots))
    return -(-width // groups)


def verify_function(
    transformer: Transformer, capacity: Capacity, attention: Attention, width: int
) -> Callable[..., tuple[Array, Array]]:
    """Return the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the device's blocks of the weights, the replica's pool, and this replica's part of a packed `VerifyBatch`.
    K/V of a draft that proves wrong is overwritten by the next step, before any query sees it.

    Returns:
        A function that returns the pool and an array as that of `decode_function`, with ``draft_tokens`` in place of
        steps: a sequence's tokens one after the other. One more part has the step in which each was sampled.
    """
    slots, ahead = jnp.arange(capacity.slots), jnp.arange(width)

    def take_steps(
        weights: DecoderWeights, pool: Array, inputs: dict[str, Array], results: list[Array]
    ) -> tuple[Array, list[Array]]:
        weights = transformer.read_outer(weights)
        # A step near the end of the drafts looks beyond them.
        drafts = jnp.pad(inputs["drafts"], ((0, 0), (0, width)), constant_values=-1)
        sampler, counts = launch_sampler(transformer, capacity, weights, inputs)
        verification = _Verification(
            transformer, capacity, attention, weights, sampler, inputs, drafts=drafts, slots=slots, ahead=ahead
        )
        step = jnp.int32(0)
        cache = attention.begin_decode(pool, inputs["page_table"], inputs["position"], transformer.kv_layers)
        done = jnp.zeros(capacity.slots, jnp.int32)
        sampled = _Sampled(inputs["token"], inputs["position"], inputs["remaining"], done, counts, results)
        step, cache, sampled = jax.lax.while_loop(
            lambda state: state[0] < inputs["num_steps"], verification.step, (step, cache, sampled)
        )
        return attention.end_decode(cache), sampled.results

    def empty() -> list[Array]:
        shape = (capacity.slots, capacity.draft_tokens)
        return [*empty_results(transformer, capacity, shape), jnp.zeros(shape, jnp.int32)]

    example = VerifyBatch.empty(capacity, width, 0)
    return launch_program(capacity, example, transformer.decode_mesh, empty, take_steps)


class _Sampled(NamedTuple):
    """The tokens that sequences have so far."""

    token: Int[Array, " slot"]  # the last one
    position: Int[Array, " slot"]  # its position
    remaining: Int[Array, " slot"]  # the number that may follow
    done: Int[Array, " slot"]  # the number that this launch has sampled
    counts: TokenCounts | None
    results: list[Array]  # the parts of what the launch returns


class _Positions(NamedTuple):
    """The positions of a step whose logits are computed, a group at a time; ``first`` of them are before a group."""

    states: Float[Array, "position slot embed"]  # the residual stream after all layers
    expected: Int[Array, "position slot"]  # what must have been sampled at a position for the next one to count
    begin: Int[Array, " slot"]  # the first position
    routed: Int[Array, "position slot word"] | None  # the experts, where they are reported


@dataclasses.dataclass(frozen=True)
class _Verification:
    """A launch: all but what changes from step to step."""

    transformer: Transformer
    capacity: Capacity
    attention: Attention
    weights: DecoderWeights
    sampler: Sampler
    inputs: Mapping[str, Array]  # the arrays of the `VerifyBatch`, this replica's entry alone

    drafts: Int[Array, "slot token"]
    slots: Int[Array, " slot"]  # numbers from 0
    ahead: Int[Array, " width"]  # numbers from 0

    def step(self, state: tuple[Array, Any, _Sampled]) -> tuple[Array, Any, _Sampled]:
        """Run the last token of each sequence and what is left of its draft, and sample as far as that is right."""
        step, cache, sampled = state
        active = sampled.remaining > 0
        cache, positions = self._run(cache, sampled, active)
        together = logits_at_once(self.capacity.slots, len(self.ahead))

        def group(number: Array, state: tuple[Array, _Sampled]) -> tuple[Array, _Sampled]:
            return self._sample(step, number * together, together, positions, *state)

        _, sampled = jax.lax.fori_loop(0, -(-len(self.ahead) // together), group, (active, sampled))
        return step + 1, cache, sampled

    def _run(self, cache: Any, sampled: _Sampled, active: Bool[Array, " slot"]) -> tuple[Any, _Positions]:
        """Run all layers over the last tokens and drafts."""
        transformer, ahead, width = self.transformer, self.ahead, len(self.ahead)
        draft = jnp.take_along_axis(self.drafts, sampled.done[:, None] + ahead[:-1], axis=1)
        # Where there is no draft the last token again: what its own query sees anyway spoils no other.
        tokens = jnp.concatenate([sampled.token[:, None], jnp.where(draft < 0, sampled.token[:, None], draft)], axis=1)
        at = sampled.position[:, None] + ahead
        used = active[:, None] & (ahead < sampled.remaining[:, None])
        page_table = self.inputs["page_table"]
        pages = jnp.take_along_axis(page_table, at // self.capacity.page_size, axis=1, mode="clip")
        pages = jnp.where(used, pages, NULL_PAGE)

        def write(carry: Any, layer: Array, kv: Array) -> Any:
            # 0 times NaN is NaN: a draft whose V is not finite would spoil the queries before it, which must not see
            # it. It is left out, and decoded by itself if it is right after all.
            cache, spoilt = carry
            finite = jnp.isfinite(kv) | (ahead == 0)[:, None, None]
            spoilt = spoilt | ~jnp.all(finite, axis=(2, 3))
            flat = layer * transformer.pages + pages
            return self.attention.write(cache, layer, flat, at, jnp.where(finite, kv, 0)), spoilt

        def attend(carry: Any, layer: Array, q: Array, sinks: Array | None) -> Array:
            table = layer * transformer.pages + page_table
            return self.attention.decode(q, carry[0], layer, table, sampled.position, active, sinks)

        x = transformer.embed(self.weights, tokens)
        carry = (cache, jnp.zeros(tokens.shape, bool))
        x, (cache, spoilt), routed = transformer.layers(
            self.weights.layers, x, carry, Past(write, attend), Sequences(sampled.position, active)
        )
        if transformer.decode_mesh.tensor > 1:
            spoilt = jax.lax.psum(spoilt.astype(jnp.int32), transformer.decode_mesh.tensor_axes) > 0
        together = logits_at_once(self.capacity.slots, width)
        beyond = -(-width // together) * together - width
        expected = jnp.where(spoilt, -1, tokens)[:, 1:].T
        expected = jnp.pad(expected, ((0, beyond + 1), (0, 0)), constant_values=-1)
        whole = ((0, beyond), (0, 0), (0, 0))
        states = jnp.pad(x.swapaxes(0, 1), whole)
        routed = None if routed is None else jnp.pad(routed.swapaxes(0, 1), whole)
        return cache, _Positions(states, expected, sampled.position, routed)

    def _sample(
        self, step: Array, first: Array, together: int, positions: _Positions, alive: Array, sampled: _Sampled
    ) -> tuple[Array, _Sampled]:
        """Sample at a group of positions; whatever is drawn after a token that the draft does not have is left out.

        Args:
            first: The first of the group's ``together`` positions.
            alive: Whether the draft of a slot is right so far.
        """
        token, position, remaining, done, counts, results = sampled
        offsets = jnp.arange(together)[:, None]
        hidden = jax.lax.dynamic_slice_in_dim(positions.states, first, together)
        logits = self.transformer.logits(self.weights, hidden.reshape(-1, hidden.shape[-1]))
        # All that follows is [position, slot].
        logits = logits.reshape(together, self.capacity.slots, -1)
        at, left = positions.begin + first + 1 + offsets, remaining - offsets
        drafted = jax.lax.dynamic_slice_in_dim(positions.expected, first, together)

        def draw_next(state: Any, inputs: Any) -> Any:
            alive, counts = state
            logits, at, drafted, left = inputs
            drawn = self._draw(step, logits, counts, at)
            counts = self.sampler.count(counts, drawn[0], alive)
            return (alive & self._goes_on(drawn[0], drafted, left), counts), drawn

        if counts is None:  # then no draw depends on the tokens before
            drawn = jax.vmap(lambda logits, at: self._draw(step, logits, None, at))(logits, at)
        else:
            (_, counts), drawn = jax.lax.scan(draw_next, (alive, counts), (logits, at, drafted, left))
        if positions.routed is not None:
            drawn.insert(-1, jax.lax.dynamic_slice_in_dim(positions.routed, first, together))
        on = self._goes_on(drawn[0], drafted, left)
        counted = alive & (jnp.cumsum(~on, axis=0) - ~on == 0)
        count = jnp.sum(counted, axis=0)
        # What does not count goes beyond the end, where nothing is written.
        place = jnp.where(counted, done + offsets, self.capacity.draft_tokens)
        last = drawn[0][jnp.maximum(count - 1, 0), self.slots]
        stopped = alive & jnp.any(last[:, None] == self.inputs["stop_ids"], axis=1)
        return alive & jnp.all(on, axis=0), _Sampled(
            token=jnp.where(alive, last, token),
            position=position + count,
            remaining=jnp.where(stopped, 0, remaining - count),
            done=done + count,
            counts=counts,
            results=[
                result.at[self.slots, place].set(value, mode="drop")
                for result, value in zip(results, drawn, strict=True)
            ],
        )

    def _draw(self, step: Array, logits: Array, counts: Any, at: Array) -> list[Array]:
        """The parts of the results of a position."""
        sampled = self.sampler.draw(logits, counts, at)
        parts = sampled_parts(self.capacity, self.transformer.decode_mesh, logits, sampled)
        return [*parts, jnp.full_like(sampled.token, step)]

    def _goes_on(self, token: Array, expected: Array, left: Array) -> Array:
        """Whether the position after a sampled token counts, if that token's own does."""
        stopped = jnp.any(token[..., None] == self.inputs["stop_ids"], axis=-1)
        return ~stopped & (left > 1) & (token == expected)
