"""The decode program: many steps on pages reserved in advance, so that hosts wait for the device once per launch."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from lockstep.engine.decoder import states
from lockstep.engine.decoder.packing import pack_results, unpack
from lockstep.engine.decoder.states import KvAndStates
from lockstep.engine.decoder.transformer import Past, Sequences, Transformer
from lockstep.engine.idle_replicas import run_if_busy
from lockstep.engine.sampling.logits_processors import TokenCounts
from lockstep.engine.sampling.logprobs import top_logprobs
from lockstep.engine.sampling.sampler import Sampled, Sampler, start_sampler
from lockstep.engine.schedule import NULL_PAGE, Capacity, DecodeBatch
from lockstep.models import DecoderWeights
from lockstep.models.attention import Attention
from lockstep.placement import DecodeMesh


class _State(NamedTuple):
    """A launch between two steps."""

    step: Int[Array, ""]
    cache: KvAndStates
    token: Int[Array, " slot"]  # the last one of each sequence
    position: Int[Array, " slot"]  # its position
    remaining: Int[Array, " slot"]  # the number of tokens that may follow
    counts: TokenCounts | None
    results: list[Array]  # the parts of what the launch returns


def launch_sampler(
    transformer: Transformer, capacity: Capacity, weights: DecoderWeights, inputs: Mapping[str, Array]
) -> tuple[Sampler, TokenCounts | None]:
    """The sampler of a launch, and the tokens that it counts."""
    return start_sampler(
        inputs,
        more_filters=capacity.more_filters,
        local_vocab=weights.embed.shape[0] if weights.lm_head is None else weights.lm_head.shape[1],
        decode_mesh=transformer.decode_mesh,
        exact=transformer.config.exact,
        apart=capacity.idle_replicas > 0,
    )


def launch_program(
    capacity: Capacity,
    example: Any,
    decode_mesh: DecodeMesh,
    empty: Callable[[], list[Array]],
    take_steps: Callable[[DecoderWeights, Any, dict[str, Array], list[Array]], tuple[Any, list[Array]]],
) -> Callable[[DecoderWeights, Any, Array], tuple[Any, Array]]:
    """Return the function of a launch that every device runs, of one that takes its steps.

    Args:
        example: A batch that has the form of those that it is given.
        empty: Makes the results of no step.
        take_steps: Takes the weights, the pool, the arrays of this replica's part of the batch, and the results of no
            step; returns pool and results. An idle replica leaves out all of it: what it computed before it waits for
            the results of others would end on a thread of the pool that the busy one computes with, and wait there
            (docs/adr/0009-idle-replicas.md).
    """

    def program(weights: DecoderWeights, pool: Any, packed: Array) -> tuple[Any, Array]:
        def fill(state: tuple[Any, list[Array]]) -> tuple[Any, list[Array]]:
            return take_steps(weights, state[0], unpack(packed[0], example), state[1])

        busy = jnp.any(unpack(packed[0], example)["remaining"] > 0)
        pool, results = run_if_busy(capacity, busy, fill, (pool, empty()))
        return pool, pack_results(results, decode_mesh)

    return program


def empty_results(transformer: Transformer, capacity: Capacity, shape: tuple[int, ...]) -> list[Array]:
    """The parts of `DecodeResults` before anything is sampled; its steps are those of the last axis of ``shape``."""
    results = [jnp.full(shape, -1, jnp.int32), jnp.zeros(shape), jnp.zeros(shape)]
    if capacity.top_logprobs:
        wide = (*shape, capacity.top_logprobs)
        results += [jnp.zeros(wide, jnp.int32), jnp.zeros(wide)]
    if transformer.routed is not None:
        results.append(jnp.zeros((*shape, transformer.routed.words), jnp.int32))
    return results


def sampled_parts(capacity: Capacity, decode_mesh: DecodeMesh, logits: Array, sampled: Sampled) -> list[Array]:
    """The parts of `DecodeResults` that the sampled tokens of a step have, experts left out."""
    parts = [sampled.token, sampled.logprob, sampled.sampled_logprob]
    if capacity.top_logprobs:
        parts += top_logprobs(logits, capacity.top_logprobs, sampled, decode_mesh)
    return parts


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

    def take_steps(
        weights: DecoderWeights, pool: Any, inputs: dict[str, Array], results: list[Array]
    ) -> tuple[Any, list[Array]]:
        past = KvAndStates.of(pool)
        weights = transformer.read_outer(weights)
        token, position, remaining = inputs["token"], inputs["position"], inputs["remaining"]
        page_table, stop_ids = inputs["page_table"], inputs["stop_ids"]
        rows = jnp.arange(capacity.slots)
        num_steps = inputs["num_steps"]
        sampler, counts = launch_sampler(transformer, capacity, weights, inputs)

        def step(state: _State) -> _State:
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
            _, *parts = sampled_parts(capacity, decode_mesh, logits, sampled)
            drawn = [jnp.where(active, sampled.token, -1), *parts]
            if routed is not None:
                drawn.append(routed[:, 0])
            stopped = jnp.any(sampled.token[:, None] == stop_ids, axis=1)
            return _State(
                step=index + 1,
                cache=cache,
                token=jnp.where(active, sampled.token, token),
                position=jnp.where(active, position + 1, position),
                remaining=jnp.where(active & ~stopped, remaining - 1, 0),
                counts=sampler.count(counts, sampled.token, active),
                results=[result.at[:, index].set(value) for result, value in zip(results, drawn, strict=True)],
            )

        cache = past._replace(kv=attention.begin_decode(past.kv, page_table, position, transformer.kv_layers))
        state = _State(jnp.int32(0), cache, token, position, remaining, counts, results)
        state = jax.lax.while_loop(lambda state: state.step < num_steps, step, state)
        cache = state.cache._replace(kv=attention.end_decode(state.cache.kv))
        return cache.pool, state.results

    empty = functools.partial(empty_results, transformer, capacity, (capacity.slots, capacity.steps))
    return launch_program(capacity, DecodeBatch.empty(capacity, 0), decode_mesh, empty, take_steps)
