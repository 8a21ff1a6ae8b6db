"""The decode program: many steps on pages reserved in advance, so that hosts meet the device once per launch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lockstep.engine.sample import sample
from lockstep.engine.transformer import Transformer
from lockstep.kernels import Context, attend_context, extend_context, lay_out_context
from lockstep.models import DecoderWeights
from lockstep.schedule import NULL_PAGE, DecodePlan, ScheduleSizes

type Cache = tuple[Array, Context]


def decode_function(transformer: Transformer, sizes: ScheduleSizes) -> Callable[..., tuple[Array, Array, Array]]:
    """The function that every device runs, inside ``shard_map`` over the decode grid.

    It takes the weights' blocks, the replica's pool, the number of steps, and the arrays of a `DecodePlan` with this
    replica's entry alone. The number of steps is an argument: it never depends on how long one replica's answers are.

    Returns:
        A function that returns the pool, and tokens int32 and log-probabilities float32 ``[replica, slot, step]``,
        whole on every device; tokens are -1 where a sequence had already ended.
    """
    grid = transformer.grid

    def decode(weights: DecoderWeights, pool: Array, num_steps: Array, *plan: Array) -> tuple[Array, Array, Array]:
        weights = transformer.read_outer(weights)
        token, position, remaining, page_table, stop_ids, draw, temperature = (argument[0] for argument in plan)
        rows = jnp.arange(sizes.slots)

        def step(state: Any) -> Any:
            index, cache, token, position, remaining, tokens, logprobs = state
            active = remaining > 0
            page = jnp.where(active, page_table[rows, position // sizes.page_size], NULL_PAGE)

            def attend(cache: Cache, layer: Array, q: Array, kv: Array) -> tuple[Cache, Array]:
                pool, context = cache
                at = (layer * transformer.pages + page, position % sizes.page_size)
                pool = pool.at[at].set(kv[:, 0].astype(pool.dtype))
                context = extend_context(context, layer, kv[:, 0], position)
                return (pool, context), attend_context(q[:, 0], context, layer, position)[:, None]

            x = transformer.embed(weights, token[:, None])
            x, cache = transformer.layers(weights.layers, x, cache, start=position, attend=attend)
            sampled, logprob = sample(transformer.logits(weights, x[:, 0]), temperature, draw, position + 1, grid)
            tokens = tokens.at[:, index].set(jnp.where(active, sampled, -1))
            logprobs = logprobs.at[:, index].set(jnp.where(active, logprob, 0.0))
            stopped = jnp.any(sampled[:, None] == stop_ids, axis=1)
            return (
                index + 1,
                cache,
                jnp.where(active, sampled, token),
                jnp.where(active, position + 1, position),
                jnp.where(active & ~stopped, remaining - 1, 0),
                tokens,
                logprobs,
            )

        shape = (sizes.slots, sizes.steps)
        state = (
            jnp.int32(0),
            (pool, lay_out_context(pool, page_table, transformer.config.num_layers)),
            token,
            position,
            remaining,
            jnp.full(shape, -1, jnp.int32),
            jnp.zeros(shape, jnp.float32),
        )
        _, (pool, _), _, _, _, tokens, logprobs = jax.lax.while_loop(lambda state: state[0] < num_steps, step, state)
        if grid.replica_axes:
            tokens = jax.lax.all_gather(tokens, grid.replica_axes)
            logprobs = jax.lax.all_gather(logprobs, grid.replica_axes)
        else:
            tokens, logprobs = tokens[None], logprobs[None]
        return pool, tokens, logprobs

    return decode


def decode_arguments(plan: DecodePlan) -> list[np.ndarray]:
    """The arrays of a plan in the order of the decode function's arguments, without the number of steps."""
    return [
        plan.token,
        plan.position,
        plan.remaining,
        plan.page_table,
        plan.stop_ids,
        plan.draw,
        plan.temperature,
    ]
