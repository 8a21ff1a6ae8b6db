"""The programs of prompts: prefill writes their K/V to the pool, a page per row; copy_pages copies partial last pages.

The decode program samples the first token from the prompt's last token, so prefill computes no logits.
Log-probabilities of a prompt are computed over the K/V that prefill wrote. Their program writes nothing to the pool, so
that the tokens sampled after a prompt are the same whether or not a request asks for them, and so that it can read
pages that several sequences share.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from lockstep.engine.decoder import states
from lockstep.engine.decoder.packing import pack_results, unpack
from lockstep.engine.decoder.states import KvAndStates
from lockstep.engine.decoder.transformer import Past, Sequences, Transformer
from lockstep.engine.idle_replicas import run_if_busy
from lockstep.engine.sampling.logprobs import target_logprobs, top_logprobs
from lockstep.engine.schedule import NULL_PAGE, Capacity, CopyPagesBatch, PrefillBatch, PromptLogprobsBatch, as_floats
from lockstep.models import DecoderWeights
from lockstep.models.attention import Attention


def prefill_function(transformer: Transformer, capacity: Capacity, attention: Attention) -> Callable[..., Any]:
    """Return the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the device's blocks of the weights, the replica's pool, and this replica's part of a packed
    `PrefillBatch`. Rows are whole pages: the K/V of tokens beyond the prompt is seen by no query before decode
    overwrites it.

    Returns:
        A function that returns the pool; with ``capacity.routed_experts`` also an array ``[replica, word, row, position
        on the page]``, replicated on every device.
    """
    example = PrefillBatch.empty(capacity)

    def prefill(weights: DecoderWeights, pool: Any, packed: Array) -> Any:
        inputs = unpack(packed[0], example)
        tokens, start, page, page_table = inputs["tokens"], inputs["start"], inputs["page"], inputs["page_table"]
        weights = transformer.read_outer(weights)
        active = page != NULL_PAGE
        rows = attention.begin_prefill(start, page_table, active)
        linear = transformer.config.linear_attention
        recur = None if linear is None else states.rows(linear, capacity.slots, inputs["slot"], start, inputs["count"])

        def write(past: KvAndStates, layer: Array, kv: Array) -> KvAndStates:
            return past._replace(kv=attention.write_pages(past.kv, layer * transformer.pages + page, kv))

        def attend(past: KvAndStates, layer: Array, q: Array, sinks: Array | None) -> Array:
            return attention.prefill(q, past.kv, layer, layer * transformer.pages, rows, sinks)

        def fill(state: tuple[KvAndStates, Any]) -> tuple[KvAndStates, Any]:
            past, _ = state
            x = transformer.embed(weights, tokens)
            return transformer.fill_cache(weights.layers, x, past, Past(write, attend, recur), Sequences(start, active))

        shape = transformer.routed
        routed = None if shape is None else jnp.zeros((*tokens.shape, shape.words), jnp.int32)
        past, routed = run_if_busy(capacity, jnp.any(active), fill, (KvAndStates.of(pool), routed))
        pool = past.pool
        return pool if routed is None else (pool, pack_results([routed], transformer.decode_mesh))

    return prefill


def copy_pages_function(num_layers: int, capacity: Capacity, attention: Attention) -> Callable[..., Any]:
    """Return the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the replica's pool and this replica's part of a packed `CopyPagesBatch`. Whole pages are copied; no
    query sees what they hold beyond the prompt before decode overwrites it.

    Args:
        attention: The attention of the devices, which copies the pages.
    """
    example = CopyPagesBatch.empty(capacity)

    def copy_pages(pool: Any, packed: Array) -> Any:
        inputs = unpack(packed[0], example)

        def layer(index: Array, pool: Any) -> Any:
            source, target = index * capacity.pages + inputs["source"], index * capacity.pages + inputs["target"]
            return jax.tree.map(lambda part: attention.copy_pages(part, source, target), pool)

        return jax.lax.fori_loop(0, num_layers, layer, pool)

    return copy_pages


PROMPT_LOGPROBS_CHUNK = 128
"""Positions whose logits, a whole vocabulary for each, are in memory at a time."""


def prompt_logprobs_function(
    transformer: Transformer, capacity: Capacity, attention: Attention
) -> Callable[..., Array]:
    """Return the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the device's blocks of the weights, the replica's pool, and this replica's part of a packed
    `PromptLogprobsBatch`.

    Returns:
        A function that returns an array ``[replica, part, row, position on the page]``, replicated on every device
        (`unpack_prompt_logprobs`): the log-probability of each target under the model; with ``capacity.top_logprobs``,
        the ids and the log-probabilities of the most probable tokens in its place.
    """
    decode_mesh = transformer.decode_mesh

    like = PromptLogprobsBatch.empty(capacity)

    def prompt_logprobs(weights: DecoderWeights, pool: Any, packed: Array) -> Array:
        given = unpack(packed[0], like)
        tokens, targets, start, page_table = (given[name] for name in ("tokens", "targets", "start", "page_table"))
        weights = transformer.read_outer(weights)
        active = targets[:, 0] >= 0
        rows = attention.begin_prefill(start, page_table, active)

        def write(pool: Any, layer: Array, kv: Array) -> Any:
            return pool

        def attend(pool: Any, layer: Array, q: Array, sinks: Array | None) -> Array:
            return attention.prefill(q, pool, layer, layer * transformer.pages, rows, sinks)

        x = transformer.embed(weights, tokens)
        x, _, _ = transformer.layers(weights.layers, x, pool, Past(write, attend), Sequences(start, active))

        def chunk(part: tuple[Array, Array]) -> list[Array]:
            states, target = part
            logits = transformer.logits(weights, states)
            given = target_logprobs(logits, target, decode_mesh, exact=transformer.config.exact)
            logprob = given.logprob
            if not capacity.top_logprobs:
                return [logprob]
            return [logprob, *top_logprobs(logits, capacity.top_logprobs, given, decode_mesh)]

        found = jax.lax.map(chunk, (chunks(x.reshape(-1, x.shape[-1])), chunks(targets.reshape(-1))))
        whole = [part.reshape(-1, *part.shape[2:])[: targets.size] for part in found]
        results = [part.reshape(*targets.shape, *part.shape[1:]) for part in whole]
        return pack_results(results, decode_mesh)

    return prompt_logprobs


def unpack_prompt_logprobs(packed: Int32[np.ndarray, "replica part row position"]) -> list[np.ndarray]:
    """Return the arrays of the function's result: log-probabilities, and with top log-probabilities ids and values."""
    if packed.shape[1] == 1:
        return [as_floats(packed[:, 0])]
    ids, values = np.split(packed[:, 1:], 2, axis=1)
    return [as_floats(packed[:, 0]), np.moveaxis(ids, 1, -1), as_floats(np.moveaxis(values, 1, -1))]


def chunks(array: Array) -> Array:
    """Split ``[token, ...]`` into ``[chunk, token in chunk, ...]``, padded with zeros."""
    size = min(PROMPT_LOGPROBS_CHUNK, array.shape[0])
    count = -(-array.shape[0] // size)
    padded = jnp.pad(array, [(0, count * size - array.shape[0]), *((0, 0) for _ in array.shape[1:])])
    return padded.reshape(count, size, *array.shape[1:])
