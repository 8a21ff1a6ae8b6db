"""Which tokens are targets, and computing something for these alone."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

NO_TARGET: Final = -1
"""The target of a token that has none."""

PARTS: Final = 4
"""The number of equal parts of the tokens, of which as many are computed as have all targets. Each is a program."""

_TILE: Final = 8  # tokens of a part are a multiple of this, the height of a TPU's tile


def target_mask(batch: Mapping[str, Array]) -> Bool[Array, "... target"]:
    """Which tokens but the first are targets: neither padding nor the first of a document."""
    mask = batch["loss_mask"][..., 1:].astype(bool)
    if "segment_ids" not in batch:
        return mask
    segments = batch["segment_ids"]
    return mask & (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] != 0)


def for_targets(
    function: Callable[..., tuple[PyTree, PyTree]], targets: Int[Array, " token"], *columns: PyTree
) -> tuple[PyTree, PyTree]:
    """Call a function with the tokens that are targets, and with others only as far as its shapes need them.

    The tokens with targets come first, then the function has the first quarter of all, or the first two and so on: the
    fewest that have all targets (`PARTS`).

    Args:
        function: Takes some targets and the same tokens of the columns. Returns arrays of these tokens, and others.
        targets: The target of each token, `NO_TARGET` where there is none.
        columns: Arrays with the token as axis 0.

    Returns:
        What the function returned, with zeros for tokens that are no target.
    """
    count = len(targets)
    sizes = np.unique([min(count, -(-count * part // (PARTS * _TILE)) * _TILE) for part in range(1, PARTS + 1)])
    is_target = targets != NO_TARGET
    order = jnp.argsort(~is_target, stable=True)
    places = jnp.argsort(order)

    def of_first(size: int) -> Callable[[Any], tuple[PyTree, PyTree]]:
        def run(inputs: Any) -> tuple[PyTree, PyTree]:
            by_token, rest = function(*jax.tree.map(lambda column: column[:size], inputs))
            return jax.tree.map(lambda x: jnp.pad(x, ((0, count - size), *((0, 0),) * (x.ndim - 1))), by_token), rest

        return run

    inputs = jax.tree.map(lambda column: jnp.take(column, order, axis=0), (targets, *columns))
    part = jnp.searchsorted(jnp.asarray(sizes), jnp.sum(is_target))
    by_token, rest = jax.lax.switch(part, [of_first(int(size)) for size in sizes], inputs)

    def in_place(x: Array) -> Array:
        return jnp.where(is_target.reshape(-1, *(1,) * (x.ndim - 1)), x[places], 0)

    return jax.tree.map(in_place, by_token), rest
