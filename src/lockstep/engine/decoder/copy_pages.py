"""The program that copies the partial page that a prompt ends with to each sequence that goes on from it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from lockstep.attention import Attention
from lockstep.schedule import CopyPagesBatch


def copy_pages_function(num_layers: int, pages: int, attention: Attention) -> Callable[..., Any]:
    """The function that every device runs, inside ``shard_map`` over the decode mesh.

    It takes the replica's pool and this replica's entry of the arrays of a `CopyPagesBatch`. What a copied page holds
    beyond the prompt comes along; no query sees it before decode overwrites it.

    Args:
        num_layers: of the model.
        pages: per layer in a replica's pool.
        attention: of the devices; it knows how they copy pages.

    Returns:
        A function that returns the pool.
    """

    def copy_pages(pool: Any, source: Array, target: Array) -> Any:
        def layer(index: Array, pool: Any) -> Any:
            first = index * pages
            return jax.tree.map(lambda part: attention.copy_pages(part, first + source[0], first + target[0]), pool)

        return jax.lax.fori_loop(0, num_layers, layer, pool)

    return copy_pages


def copy_pages_arguments(plan: CopyPagesBatch) -> list[np.ndarray]:
    """The arrays of a plan in the order of the function's arguments."""
    return [plan.source, plan.target]
