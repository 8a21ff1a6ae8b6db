"""The decode program: many steps on pages reserved in advance, so that hosts wait for the device once per launch.

Verify is decode with drafts: steps that run many positions of each sequence, as far as a draft may be right. A draw
depends on (seed, prompt, generation, position, token) and the logits alone. So what decode would sample after each
token of a draft is known from one pass over all of them, and the draft is right up to the first token that is not what
was sampled there. Nothing is accepted by probability, and no distribution is corrected: the tokens are those of decode.
Speculative decoding otherwise: Leviathan et al. 2022, https://arxiv.org/abs/2211.17192.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lockstep.engine.decoder import states
from lockstep.engine.decoder.packing import pack_results, unpack
from lockstep.engine.decoder.states import KvAndStates
from lockstep.engine.decoder.transformer import Past, Sequences, Transformer
from lockstep.engine.idle_replicas import own_steps
from lockstep.engine.sampling.logits_processors import TokenCounts
from lockstep.engine.sampling.logprobs import top_logprobs
from lockstep.engine.sampling.sampler import Sampler, start_sampler
from lockstep.engine.schedule import NULL_PAGE, Capacity, DecodeBatch, VerifyBatch
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


def _start(
    transformer: Transformer, capacity: Capacity, weights: DecoderWeights, inputs: Mapping[str, Array]
) -> tuple[Sampler, TokenCounts | None]:
    """The sampler of a launch, and the tokens that it counts."""
    return start_sampler(
        inputs,
        more_filters=capacity.more_filters,
        local_vocab=weights.embed.shape[0] if weights.lm_head is None else weights.lm_head.shape[1],
        decode_mesh=transformer.decode_mesh,
        exact=transformer.config.exact,
    )


def _no_results(transformer: Transformer, capacity: Capacity, shape: tuple[int, ...]) -> list[Array]:
    """The parts of `DecodeResults` before anything is sampled; its steps are those of the last axis of ``shape``."""
    results = [jnp.full(shape, -1, jnp.int32), jnp.zeros(shape), jnp.zeros(shape)]
    if capacity.top_logprobs:
        wide = (*shape, capacity.top_logprobs)
        results += [jnp.zeros(wide, jnp.int32), jnp.zeros(wide)]
    if transformer.routed is not None:
        results.append(jnp.zeros((*shape, transformer.routed.words), jnp.int32))
    return results


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
    decode_mesh = transformer.decode_mesh
    example = VerifyBatch.empty(capacity, width, 0)
    together = logits_at_once(capacity.slots, width)
    groups = -(-width // together)
    rows, ahead = jnp.arange(capacity.slots), jnp.arange(width)

    def verify(weights: DecoderWeights, pool: Array, packed: Array) -> tuple[Array, Array]:
        weights = transformer.read_outer(weights)
        inputs = unpack(packed[0], example)
        page_table, stop_ids = inputs["page_table"], inputs["stop_ids"]
        # A step near the end of the drafts looks beyond them.
        drafts = jnp.pad(inputs["drafts"], ((0, 0), (0, width)), constant_values=-1)
        num_steps = own_steps(capacity, inputs["num_steps"], jnp.any(inputs["remaining"] > 0))
        sampler, counts = _start(transformer, capacity, weights, inputs)

        def step(state: Any) -> Any:
            index, cache, token, position, remaining, done, counts, results = state
            active = remaining > 0
            draft = jnp.take_along_axis(drafts, done[:, None] + ahead[:-1], axis=1)
            # Where there is no draft the last token again: what its own query sees anyway spoils no other.
            inputs = jnp.concatenate([token[:, None], jnp.where(draft < 0, token[:, None], draft)], axis=1)
            at = position[:, None] + ahead
            used = active[:, None] & (ahead < remaining[:, None])
            pages = jnp.take_along_axis(page_table, at // capacity.page_size, axis=1, mode="clip")
            pages = jnp.where(used, pages, NULL_PAGE)

            def write(carry: Any, layer: Array, kv: Array) -> Any:
                # 0 times NaN is NaN: a draft whose V is not finite would spoil the queries before it, which must not
                # see it. It is left out, and decoded by itself if it is right after all.
                cache, spoilt = carry
                finite = jnp.isfinite(kv) | (ahead == 0)[:, None, None]
                spoilt = spoilt | ~jnp.all(finite, axis=(2, 3))
                flat = layer * transformer.pages + pages
                return attention.write(cache, layer, flat, at, jnp.where(finite, kv, 0)), spoilt

            def attend(carry: Any, layer: Array, q: Array, sinks: Array | None) -> Array:
                table = layer * transformer.pages + page_table
                return attention.decode(q, carry[0], layer, table, position, active, sinks)

            x = transformer.embed(weights, inputs)
            carry = (cache, jnp.zeros(inputs.shape, bool))
            x, (cache, spoilt), routed = transformer.layers(
                weights.layers, x, carry, Past(write, attend), Sequences(position, active)
            )
            if decode_mesh.tensor > 1:
                spoilt = jax.lax.psum(spoilt.astype(jnp.int32), decode_mesh.tensor_axes) > 0
            # [position, slot]: what must have been sampled at a position for the next one to count.
            expected = jnp.where(spoilt, -1, inputs)[:, 1:].T
            expected = jnp.pad(expected, ((0, groups * together + 1 - width), (0, 0)), constant_values=-1)
            beyond = ((0, groups * together - width), (0, 0), (0, 0))
            by_position = jnp.pad(x.swapaxes(0, 1), beyond)
            routed = None if routed is None else jnp.pad(routed.swapaxes(0, 1), beyond)
            begin = position

            def draw(logits: Array, counts: Any, at: Array) -> list[Array]:
                sampled = sampler.draw(logits, counts, at)
                drawn = [sampled.token, sampled.logprob, sampled.sampled_logprob]
                if capacity.top_logprobs:
                    drawn += top_logprobs(logits, capacity.top_logprobs, sampled, decode_mesh)
                return [*drawn, jnp.full_like(sampled.token, index)]

            def goes_on(token: Array, expected: Array, left: Array) -> Array:
                """Whether the position after a sampled token counts, if that token's own does."""
                stopped = jnp.any(token[..., None] == stop_ids, axis=-1)
                return ~stopped & (left > 1) & (token == expected)

            def sample_group(group: Array, state: Any) -> Any:
                alive, token, position, remaining, done, counts, results = state
                first, offsets = group * together, jnp.arange(together)[:, None]
                hidden = jax.lax.dynamic_slice_in_dim(by_position, first, together)
                logits = transformer.logits(weights, hidden.reshape(-1, hidden.shape[-1]))
                # All that follows is [position, slot].
                logits = logits.reshape(together, capacity.slots, -1)
                at, left = begin + first + 1 + offsets, remaining - offsets
                drafted = jax.lax.dynamic_slice_in_dim(expected, first, together)

                def draw_next(state: Any, inputs: Any) -> Any:
                    alive, counts = state
                    logits, at, drafted, left = inputs
                    drawn = draw(logits, counts, at)
                    counts = sampler.count(counts, drawn[0], alive)
                    return (alive & goes_on(drawn[0], drafted, left), counts), drawn

                if counts is None:  # then no draw depends on the tokens before
                    drawn = jax.vmap(lambda logits, at: draw(logits, None, at))(logits, at)
                else:
                    (_, counts), drawn = jax.lax.scan(draw_next, (alive, counts), (logits, at, drafted, left))
                if routed is not None:
                    drawn.insert(-1, jax.lax.dynamic_slice_in_dim(routed, first, together))
                on = goes_on(drawn[0], drafted, left)
                counted = alive & (jnp.cumsum(~on, axis=0) - ~on == 0)
                count = jnp.sum(counted, axis=0)
                # What does not count goes beyond the end, where nothing is written.
                place = jnp.where(counted, done + offsets, capacity.draft_tokens)
                last = drawn[0][jnp.maximum(count - 1, 0), rows]
                stopped = alive & jnp.any(last[:, None] == stop_ids, axis=1)
                return (
                    alive & jnp.all(on, axis=0),
                    jnp.where(alive, last, token),
                    position + count,
                    jnp.where(stopped, 0, remaining - count),
                    done + count,
                    counts,
                    [
                        result.at[rows, place].set(value, mode="drop")
                        for result, value in zip(results, drawn, strict=True)
                    ],
                )

            state = (active, token, position, remaining, done, counts, results)
            _, *state = jax.lax.fori_loop(0, groups, sample_group, state)
            return index + 1, cache, *state

        steps = jnp.zeros((capacity.slots, capacity.draft_tokens), jnp.int32)
        results = [*_no_results(transformer, capacity, steps.shape), steps]
        state = (
            jnp.int32(0),
            attention.begin_decode(pool, page_table, inputs["position"], transformer.kv_layers),
            inputs["token"],
            inputs["position"],
            inputs["remaining"],
            jnp.zeros(capacity.slots, jnp.int32),
            counts,
            results,
        )
        state = jax.lax.while_loop(lambda state: state[0] < num_steps, step, state)
        return attention.end_decode(state[1]), pack_results(state[-1], decode_mesh)

    return verify


def decode_function(
    transformer: Transformer, capacity: Capacity, attention: Attention
) -> Callable[..., tuple[Array, Array]]:
    """Return the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the device's blocks of the weights, the replica's pool, and this replica's part of a packed `DecodeBatch`.
    The number of steps in it is the same on every replica: it never depends on how long one replica's answers are.

    Returns:
        A function that returns the pool and an array ``[replica, part, slot, step]``, replicated on every device
        (`DecodeResults`): the tokens, -1 where a sequence had already ended; their log-probabilities under the model;
        those under the distribution that they were drawn from; with ``capacity.top_logprobs``, the ids and the
        log-probabilities of the most probable tokens; with ``capacity.routed_experts``, the experts of the position
        before each token.
    """
    decode_mesh = transformer.decode_mesh
    example = DecodeBatch.empty(capacity, 0)

    def decode(weights: DecoderWeights, pool: Any, packed: Array) -> tuple[Any, Array]:
        past = KvAndStates.of(pool)
        weights = transformer.read_outer(weights)
        inputs = unpack(packed[0], example)
        token, position, remaining = inputs["token"], inputs["position"], inputs["remaining"]
        page_table, stop_ids = inputs["page_table"], inputs["stop_ids"]
        rows = jnp.arange(capacity.slots)
        num_steps = own_steps(capacity, inputs["num_steps"], jnp.any(remaining > 0))
        sampler, counts = _start(transformer, capacity, weights, inputs)

        def step(state: Any) -> Any:
            index, cache, token, position, remaining, counts, results = state
            active = remaining > 0
            page = jnp.where(active, page_table[rows, position // capacity.page_size], NULL_PAGE)[:, None]
            linear = transformer.config.linear_attention
            recur = None if linear is None else states.step(linear, position, active)

            def write(cache: KvAndStates, layer: Array, kv: Array) -> KvAndStates:
                place = layer * transformer.pages + page
                return cache._replace(kv=attention.write(cache.kv, layer, place, position[:, None], kv))

            def attend(cache: KvAndStates, layer: Array, q: Array, sinks: Array | None) -> Array:
                table = layer * transformer.pages + page_table
                return attention.decode(q, cache.kv, layer, table, position, active, sinks)

            x = transformer.embed(weights, token[:, None])
            x, cache, routed = transformer.layers(
                weights.layers, x, cache, Past(write, attend, recur), Sequences(position, active)
            )
            logits = transformer.logits(weights, x[:, 0])
            sampled = sampler.draw(logits, counts, position + 1)
            drawn = [jnp.where(active, sampled.token, -1), sampled.logprob, sampled.sampled_logprob]
            if capacity.top_logprobs:
                drawn += top_logprobs(logits, capacity.top_logprobs, sampled, decode_mesh)
            if routed is not None:
                drawn.append(routed[:, 0])
            stopped = jnp.any(sampled.token[:, None] == stop_ids, axis=1)
            return (
                index + 1,
                cache,
                jnp.where(active, sampled.token, token),
                jnp.where(active, position + 1, position),
                jnp.where(active & ~stopped, remaining - 1, 0),
                sampler.count(counts, sampled.token, active),
                [result.at[:, index].set(value) for result, value in zip(results, drawn, strict=True)],
            )

        results = _no_results(transformer, capacity, (capacity.slots, capacity.steps))
        state = (
            jnp.int32(0),
            past._replace(kv=attention.begin_decode(past.kv, page_table, position, transformer.kv_layers)),
            token,
            position,
            remaining,
            counts,
            results,
        )
        _, cache, _, _, _, _, results = jax.lax.while_loop(lambda state: state[0] < num_steps, step, state)
        return cache._replace(kv=attention.end_decode(cache.kv)).pool, pack_results(results, decode_mesh)

    return decode
