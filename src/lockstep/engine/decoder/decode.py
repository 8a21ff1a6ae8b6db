"""The decode program: many steps on pages reserved in advance, so that hosts wait for the device once per launch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lockstep.engine.decoder.arguments import pack_results, unpack
from lockstep.engine.decoder.transformer import Transformer
from lockstep.engine.idle_replicas import own_steps
from lockstep.engine.sampling.logprobs import top_logprobs
from lockstep.engine.sampling.sampler import start_sampler
from lockstep.engine.schedule import NULL_PAGE, Capacity, DecodeBatch
from lockstep.models import DecoderWeights
from lockstep.models.attention import Attention


def decode_function(
    transformer: Transformer, capacity: Capacity, attention: Attention
) -> Callable[..., tuple[Array, Array]]:
    """Returns the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the device's blocks of the weights, the replica's pool, and this replica's part of a packed `DecodeBatch`.
    The number of steps in it is the same on every replica: it never depends on how long one replica's answers are.

    Args:
        transformer: The model.
        capacity: The capacities of the programs.
        attention: The attention of the devices.

    Returns:
        A function that returns the pool and an array ``[replica, part, slot, step]``, replicated on every device
        (`DecodeResults`): the tokens, -1 where a sequence had already ended; their log-probabilities under the model;
        those under the distribution that they were drawn from; with ``capacity.top_logprobs``, the ids and the
        log-probabilities of the most probable tokens.
    """
    decode_mesh = transformer.decode_mesh
    like = DecodeBatch.empty(capacity, 0)

    def decode(weights: DecoderWeights, pool: Array, packed: Array) -> tuple[Array, Array]:
        weights = transformer.read_outer(weights)
        given = unpack(packed[0], like)
        token, position, remaining = given["token"], given["position"], given["remaining"]
        page_table, stop_ids = given["page_table"], given["stop_ids"]
        rows = jnp.arange(capacity.slots)
        num_steps = own_steps(capacity, given["num_steps"], jnp.any(remaining > 0))
        sampler, counts = start_sampler(
            given["draw"],
            given["temperature"],
            stop_ids,
            {name: given[name] for name in like.sampling.arrays()},
            more_filters=capacity.more_filters,
            active=remaining > 0,
            local_vocab=weights.embed.shape[0] if weights.lm_head is None else weights.lm_head.shape[1],
            decode_mesh=decode_mesh,
        )

        def step(state: Any) -> Any:
            index, cache, token, position, remaining, counts, results = state
            active = remaining > 0
            page = jnp.where(active, page_table[rows, position // capacity.page_size], NULL_PAGE)

            def write(cache: Any, layer: Array, kv: Array) -> Any:
                return attention.write(cache, layer, layer * transformer.pages + page, position, kv[:, 0])

            def attend(cache: Any, layer: Array, q: Array) -> Array:
                table = layer * transformer.pages + page_table
                return attention.decode(q[:, 0], cache, layer, table, position, active)[:, None]

            x = transformer.embed(weights, token[:, None])
            x, cache = transformer.layers(weights.layers, x, cache, start=position, write=write, attend=attend)
            logits = transformer.logits(weights, x[:, 0])
            sampled = sampler.draw(logits, counts, position + 1)
            found = [jnp.where(active, sampled.token, -1), sampled.logprob, sampled.sampled_logprob]
            if capacity.top_logprobs:
                found += top_logprobs(logits, capacity.top_logprobs, sampled, decode_mesh)
            stopped = jnp.any(sampled.token[:, None] == stop_ids, axis=1)
            return (
                index + 1,
                cache,
                jnp.where(active, sampled.token, token),
                jnp.where(active, position + 1, position),
                jnp.where(active & ~stopped, remaining - 1, 0),
                sampler.count(counts, sampled.token, active),
                [result.at[:, index].set(one) for result, one in zip(results, found, strict=True)],
            )

        shape = (capacity.slots, capacity.steps)
        results = [jnp.full(shape, -1, jnp.int32), jnp.zeros(shape), jnp.zeros(shape)]
        if capacity.top_logprobs:
            wide = (*shape, capacity.top_logprobs)
            results += [jnp.zeros(wide, jnp.int32), jnp.zeros(wide)]
        state = (
            jnp.int32(0),
            attention.begin_decode(pool, page_table, position, transformer.config.num_layers),
            token,
            position,
            remaining,
            counts,
            results,
        )
        _, cache, _, _, _, _, results = jax.lax.while_loop(lambda state: state[0] < num_steps, step, state)
        return attention.end_decode(cache), pack_results(results, decode_mesh)

    return decode
