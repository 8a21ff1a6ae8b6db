"""Errors that an engine can have: what `logprob_gap` has to show."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.models.attention import xla

type Model = tuple[LlamaConfig, DecoderWeights]


def scale_left_out(name: str, layer: int | None = None) -> Callable[[Model], Model]:
    """An engine that leaves out the scale of a norm.

    Args:
        name: The weight, of `LayerWeights` or `DecoderWeights`.
        layer: The layer in which it is left out; None: in all.
    """

    def wrong(scale: jax.Array) -> jax.Array:
        ones = jnp.ones_like(scale)
        return ones if layer is None else scale.at[layer].set(ones[layer])

    return lambda model: _with(model, **{name: wrong})


def bias_left_out(name: str) -> Callable[[Model], Model]:
    """An engine that does not add a bias.

    Args:
        name: The weight of `LayerWeights`.
    """
    return lambda model: _with(model, **{name: jnp.zeros_like})


def other_rope_base(theta: float) -> Callable[[Model], Model]:
    """An engine with a base of the rotary embeddings that is not the model's.

    Args:
        theta: The base.
    """

    def wrong(model: Model) -> Model:
        config, weights = model
        return dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=theta)), weights

    return wrong


def other_norm_epsilon(epsilon: float) -> Callable[[Model], Model]:
    """An engine that adds another small number to the mean square of its norms.

    Args:
        epsilon: The number.
    """
    return lambda model: (dataclasses.replace(model[0], layer_norm_epsilon=epsilon), model[1])


def interleaved_rope(model: Model) -> Model:
    """An engine that reads heads as pairs of neighbours, as Meta's checkpoints have them, and not as two halves."""

    def wrong(weight: jax.Array) -> jax.Array:
        return jnp.concatenate([weight[..., 0::2], weight[..., 1::2]], axis=-1)

    return _with(model, q=wrong, k=wrong)


@contextlib.contextmanager
def pages_of_others() -> Iterator[None]:
    """Engines compiled inside attend, in decode, to the first page of another slot in place of their own."""
    gather = xla.gather_context

    def wrong(pool: jax.Array, page_table: jax.Array, *others: object, **options: object) -> object:
        return gather(pool, page_table.at[:, 0].set(jnp.roll(page_table[:, 0], 1)), *others, **options)  # type: ignore[arg-type]

    xla.gather_context = wrong  # type: ignore[assignment]
    try:
        yield
    finally:
        xla.gather_context = gather


def _with(model: Model, **changes: Callable[[jax.Array], jax.Array]) -> Model:
    """The model with changed weights, each placed as it was."""
    config, weights = model

    def changed(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
        change = changes.get(path[-1].name)  # type: ignore[attr-defined]
        return leaf if change is None else jax.device_put(change(leaf), leaf.sharding)

    return config, jax.tree_util.tree_map_with_path(changed, weights)
