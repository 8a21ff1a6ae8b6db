"""The copy_pages program: copies the partial last page of a prompt to the other sequences with the same prompt."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from lockstep.engine.decoder.arguments import unpack
from lockstep.engine.schedule import Capacity, CopyPagesBatch
from lockstep.models.attention import Attention


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
