"""The copy_pages program: copies the partial last page of a prompt to the other sequences with the same prompt."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from lockstep.attention import Attention
from lockstep.schedule import CopyPagesBatch


def copy_pages_function(num_layers: int, pages: int, attention: Attention) -> Callable[..., Any]:
    """Returns the function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the replica's pool and this replica's entry of the arrays of a `CopyPagesBatch`. Whole pages are copied; no
    query sees what they hold beyond the prompt before decode overwrites it.

    Args:
        num_layers: The number of layers of the model.
        pages: The number of pages per layer in a replica's pool.
        attention: The attention of the devices, which copies the pages.

    Returns:
        A function that returns the pool.
    """

    def copy_pages(pool: Any, source: Array, target: Array) -> Any:
        def layer(index: Array, pool: Any) -> Any:
            first = index * pages
            return jax.tree.map(lambda part: attention.copy_pages(part, first + source[0], first + target[0]), pool)

        return jax.lax.fori_loop(0, num_layers, layer, pool)

    return copy_pages


def copy_pages_arguments(batch: CopyPagesBatch) -> list[np.ndarray]:
    """Returns the arrays of a batch in the order of the function's arguments."""
    return [batch.source, batch.target]
