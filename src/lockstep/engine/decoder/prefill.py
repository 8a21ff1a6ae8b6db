"""The programs of prompts: prefill writes their K/V to the pool, a page per row; copy_pages copies partial last pages.

The decode program samples the first token from the prompt's last token, so prefill computes no logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lockstep.engine.decoder.arguments import unpack
from lockstep.engine.decoder.transformer import Transformer
from lockstep.engine.idle_replicas import run_if_busy
from lockstep.engine.schedule import NULL_PAGE, Capacity, CopyPagesBatch, PrefillBatch
from lockstep.models import DecoderWeights
from lockstep.models.attention import Attention


def prefill_function(transformer: Transformer, capacity: Capacity, attention: Attention) -> Callable[..., Array]:
    """Returns the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the device's blocks of the weights, the replica's pool, and this replica's part of a packed
    `PrefillBatch`. Rows are whole pages: the K/V of tokens beyond the prompt is seen by no query before decode
    overwrites it.

    Args:
        transformer: The model.
        capacity: The capacities of the programs.
        attention: The attention of the devices.

    Returns:
        A function that returns the pool.
    """
    like = PrefillBatch.empty(capacity)

    def prefill(weights: DecoderWeights, pool: Array, packed: Array) -> Array:
        given = unpack(packed[0], like)
        tokens, start, page, page_table = given["tokens"], given["start"], given["page"], given["page_table"]
        weights = transformer.read_outer(weights)
        rows = attention.begin_prefill(start, page_table, page != NULL_PAGE)

        def write(pool: Array, layer: Array, kv: Array) -> Array:
            return attention.write_pages(pool, layer * transformer.pages + page, kv)

        def attend(pool: Array, layer: Array, q: Array) -> Array:
            return attention.prefill(q, pool, layer, layer * transformer.pages, rows)

        def fill(pool: Array) -> Array:
            x = transformer.embed(weights, tokens)
            return transformer.fill_cache(weights.layers, x, pool, start=start, write=write, attend=attend)

        return run_if_busy(capacity, jnp.any(page != NULL_PAGE), fill, pool)

    return prefill


def copy_pages_function(num_layers: int, capacity: Capacity, attention: Attention) -> Callable[..., Any]:
    """Returns the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the replica's pool and this replica's part of a packed `CopyPagesBatch`. Whole pages are copied; no
    query sees what they hold beyond the prompt before decode overwrites it.

    Args:
        num_layers: The number of layers of the model.
        capacity: The capacities of the programs.
        attention: The attention of the devices, which copies the pages.

    Returns:
        A function that returns the pool.
    """
    like = CopyPagesBatch.empty(capacity)

    def copy_pages(pool: Any, packed: Array) -> Any:
        given = unpack(packed[0], like)

        def layer(index: Array, pool: Any) -> Any:
            source, target = index * capacity.pages + given["source"], index * capacity.pages + given["target"]
            return jax.tree.map(lambda part: attention.copy_pages(part, source, target), pool)

        return jax.lax.fori_loop(0, num_layers, layer, pool)

    return copy_pages
