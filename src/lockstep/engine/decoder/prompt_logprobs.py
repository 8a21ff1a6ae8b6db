"""The prompt_logprobs program: log-probabilities of prompt tokens, computed over the K/V that prefill wrote.

It writes nothing to the pool, so that the tokens sampled after a prompt are the same whether or not a request asks for
the log-probabilities of the prompt, and so that it can read pages that several sequences share.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lockstep.attention import Attention
from lockstep.engine.decoder.transformer import Transformer
from lockstep.engine.sampling.logits_processors import local_ids
from lockstep.engine.sampling.logprobs import top_logprobs
from lockstep.engine.sampling.sampler import Sampled, first_id
from lockstep.models import DecoderWeights
from lockstep.schedule import Capacity, PromptLogprobsBatch

PROMPT_LOGPROBS_CHUNK = 128
"""Positions whose logits, a whole vocabulary for each, are in memory at a time."""


def prompt_logprobs_function(
    transformer: Transformer, capacity: Capacity, attention: Attention
) -> Callable[..., tuple[Array, ...]]:
    """Returns the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the device's blocks of the weights, the replica's pool, and this replica's entry of the arrays of a
    `PromptLogprobsBatch`.

    Args:
        transformer: The model.
        capacity: The capacities of the programs.
        attention: The attention of the devices.

    Returns:
        A function that returns `num_prompt_logprobs` arrays ``[replica, row, position on the page, ...]``, replicated
        on every device: the log-probability of each target under the model, float32; with ``capacity.top_logprobs``,
        the ids and the log-probabilities of the most probable tokens in its place.
    """
    decode_mesh = transformer.decode_mesh

    def prompt_logprobs(
        weights: DecoderWeights, pool: Any, tokens: Array, targets: Array, start: Array, page_table: Array
    ) -> tuple[Array, ...]:
        tokens, targets, start, page_table = (argument[0] for argument in (tokens, targets, start, page_table))
        weights = transformer.read_outer(weights)
        rows = attention.begin_prefill(start, page_table, targets[:, 0] >= 0)

        def write(pool: Any, layer: Array, kv: Array) -> Any:
            return pool

        def attend(pool: Any, layer: Array, q: Array) -> Array:
            return attention.prefill(q, pool, layer * transformer.pages, rows)

        x = transformer.embed(weights, tokens)
        x, _ = transformer.layers(weights.layers, x, pool, start=start, write=write, attend=attend)

        def chunk(part: tuple[Array, Array]) -> list[Array]:
            states, target = part
            logits = transformer.logits(weights, states)
            max_logit = jnp.max(logits, axis=1)
            if decode_mesh.tensor > 1:
                max_logit = jax.lax.pmax(max_logit, decode_mesh.tensor_axes)
            sum_exp = jnp.sum(jnp.exp(logits - max_logit[:, None]), axis=1)
            size = logits.shape[1]
            index = local_ids(target, first_id(size, decode_mesh), size)
            logit = jnp.take_along_axis(logits, jnp.minimum(index, size - 1)[:, None], axis=1)[:, 0]
            logit = jnp.where(index < size, logit, 0.0)
            if decode_mesh.tensor > 1:
                sum_exp, logit = jax.lax.psum((sum_exp, logit), decode_mesh.tensor_axes)
            logprob = logit - max_logit - jnp.log(sum_exp)
            if not capacity.top_logprobs:
                return [logprob]
            given = Sampled(target, logprob, logprob, max_logit, jnp.log(sum_exp))
            return [logprob, *top_logprobs(logits, capacity.top_logprobs, given, decode_mesh)]

        found = jax.lax.map(chunk, (_chunks(x.reshape(-1, x.shape[-1])), _chunks(targets.reshape(-1))))
        whole = [part.reshape(-1, *part.shape[2:])[: targets.size] for part in found]
        results = [part.reshape(*targets.shape, *part.shape[1:]) for part in whole]
        if decode_mesh.replica_axes:
            return tuple(jax.lax.all_gather(result, decode_mesh.replica_axes) for result in results)
        return tuple(result[None] for result in results)

    return prompt_logprobs


def num_prompt_logprobs(capacity: Capacity) -> int:
    """Returns the number of arrays that the prompt_logprobs function returns."""
    return 3 if capacity.top_logprobs else 1


def prompt_logprobs_arguments(batch: PromptLogprobsBatch) -> list[np.ndarray]:
    """Returns the arrays of a batch in the order of the prompt_logprobs function's arguments."""
    return [batch.tokens, batch.targets, batch.start, batch.page_table]


def _chunks(array: Array) -> Array:
    """Splits ``[token, ...]`` into ``[chunk, token in chunk, ...]``, padded with zeros."""
    size = min(PROMPT_LOGPROBS_CHUNK, array.shape[0])
    count = -(-array.shape[0] // size)
    padded = jnp.pad(array, [(0, count * size - array.shape[0]), *((0, 0) for _ in array.shape[1:])])
    return padded.reshape(count, size, *array.shape[1:])
