"""The score program: log-probabilities of prompt tokens, computed again over K/V that prefill wrote.

It writes nothing, so what is sampled after a prompt is the same whether or not somebody asks what the prompt itself is
worth, and pages that a prompt shares with others are read like its own.
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
"""Positions whose logits are held at a time: a whole vocabulary for each."""


def prompt_logprobs_function(
    transformer: Transformer, sizes: Capacity, attention: Attention
) -> Callable[..., tuple[Array, ...]]:
    """The function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the weights' blocks, the replica's pool, and this replica's entry of the arrays of a
    `PromptLogprobsBatch`.

    Returns:
        A function that returns `num_prompt_logprobs` arrays ``[replica, row, position on the page, ...]``, whole on
        every device: the log-probability of each target under the model, float32; ids and log-probabilities of the
        most probable tokens in its place, where asked.
    """
    decode_mesh = transformer.decode_mesh

    def score(
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
            states, wanted = part
            logits = transformer.logits(weights, states)
            top = jnp.max(logits, axis=1)
            if decode_mesh.tensor > 1:
                top = jax.lax.pmax(top, decode_mesh.tensor_axes)
            sum_exp = jnp.sum(jnp.exp(logits - top[:, None]), axis=1)
            size = logits.shape[1]
            place = local_ids(wanted, first_id(size, decode_mesh), size)
            own = jnp.take_along_axis(logits, jnp.minimum(place, size - 1)[:, None], axis=1)[:, 0]
            own = jnp.where(place < size, own, 0.0)
            if decode_mesh.tensor > 1:
                sum_exp, own = jax.lax.psum((sum_exp, own), decode_mesh.tensor_axes)
            found = own - top - jnp.log(sum_exp)
            if not sizes.top_logprobs:
                return [found]
            here = Sampled(wanted, found, found, top, jnp.log(sum_exp))
            return [found, *top_logprobs(logits, sizes.top_logprobs, here, decode_mesh)]

        found = jax.lax.map(chunk, (_chunks(x.reshape(-1, x.shape[-1])), _chunks(targets.reshape(-1))))
        whole = [part.reshape(-1, *part.shape[2:])[: targets.size] for part in found]
        results = [part.reshape(*targets.shape, *part.shape[1:]) for part in whole]
        if decode_mesh.replica_axes:
            return tuple(jax.lax.all_gather(result, decode_mesh.replica_axes) for result in results)
        return tuple(result[None] for result in results)

    return score


def num_prompt_logprobs(sizes: Capacity) -> int:
    """Arrays that the score function returns."""
    return 3 if sizes.top_logprobs else 1


def prompt_logprobs_arguments(plan: PromptLogprobsBatch) -> list[np.ndarray]:
    """The arrays of a plan in the order of the score function's arguments."""
    return [plan.tokens, plan.targets, plan.start, plan.page_table]


def _chunks(array: Array) -> Array:
    """``[token, ...]`` to ``[chunk, token in chunk, ...]``, padded with zeros."""
    size = min(PROMPT_LOGPROBS_CHUNK, array.shape[0])
    count = -(-array.shape[0] // size)
    padded = jnp.pad(array, [(0, count * size - array.shape[0]), *((0, 0) for _ in array.shape[1:])])
    return padded.reshape(count, size, *array.shape[1:])
