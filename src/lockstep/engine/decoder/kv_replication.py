"""More devices to a replica than the model has kv heads: each kv head on several, which share its query heads."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from lockstep.errors import ConfigError
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.placement.lazy_weight import Assemble, LazyWeight, axis_specs, resharded

_QUERY = {"q": 1, "q_bias": 0, "q_wide_norm": 0, "o": 0}
_KEY_VALUE = {"k": 1, "v": 1, "k_bias": 0, "v_bias": 0, "k_wide_norm": 0}
"""The axis of the kv heads in one layer of each weight that has them."""


def replicates_kv_heads(model: LlamaConfig, tensor: int) -> bool:
    """Whether so many devices hold each kv head several times, and can divide its query heads."""
    kv, group = model.num_kv_heads, model.q_heads_per_group
    return tensor > kv and tensor % kv == 0 and group % (tensor // kv) == 0


def replicate_kv_heads(model: LlamaConfig, weights: DecoderWeights, tensor: int) -> tuple[LlamaConfig, DecoderWeights]:
    """The model as ``tensor`` devices see it: with a kv head for each of them, repeated where it has fewer.

    Args:
        model: of the model.
        weights: arrays, shape structs or `LazyWeight`; nothing is launched or copied.
        tensor: devices per replica.

    Returns:
        Both as they are where there are kv heads enough; else a model with ``tensor`` kv heads that computes the same,
        whose weights are made on the way into the decode layout.

    Raises:
        ConfigError: the trainer has a weight cut inside a kv head.
    """
    if not replicates_kv_heads(model, tensor):
        return model, weights
    times = tensor // model.num_kv_heads
    group, size = model.q_heads_per_group // times, model.head_size
    layers = weights.layers

    def replicate(name: str, axis: int, heads: tuple[int, ...], assemble: Assemble) -> Any:
        leaf = getattr(layers, name)
        if leaf is None:
            return None
        spec = axis_specs(leaf)
        sharding = getattr(leaf, "sharding", None)
        pieces = 1
        if isinstance(sharding, NamedSharding) and spec[axis + 1] is not None:
            axes = spec[axis + 1] if isinstance(spec[axis + 1], tuple) else (spec[axis + 1],)
            pieces = math.prod(sharding.mesh.shape[one] for one in axes)
        after = leaf.shape[-1:] if name == "o" else ()
        inside = spec[axis + 2 : len(spec) - len(after)]
        if model.num_kv_heads % pieces or any(one is not None for one in inside):
            raise ConfigError(
                f"layout {{tensor: {tensor}}} needs each of the {model.num_kv_heads} kv heads on {times} devices, and "
                f"the trainer has the weight {name} cut inside a kv head: {sharding}. Set tensor to at most "
                f"{model.num_kv_heads}."
            )
        return LazyWeight(
            parts=leaf.parts if isinstance(leaf, LazyWeight) else (leaf,),
            assemble=_Then(leaf.assemble, assemble) if isinstance(leaf, LazyWeight) else assemble,
            shape=(*leaf.shape[: axis + 1], tensor, *heads, *after),
            dtype=leaf.dtype,
            sharding=resharded(leaf, (*spec[: axis + 2], *(None for _ in heads), *spec[len(spec) - len(after) :])),
            stacked=True,
            by_layer=leaf.by_layer if isinstance(leaf, LazyWeight) else False,
        )

    changed = {
        name: replicate(name, axis, (group, size), _Regroup(axis, group, size, 1 if name == "o" else 0))
        for name, axis in _QUERY.items()
    }
    changed |= {name: replicate(name, axis, (size,), _Repeat(axis, times, size)) for name, axis in _KEY_VALUE.items()}
    return (
        dataclasses.replace(model, num_kv_heads=tensor, head_dim=size),
        dataclasses.replace(weights, layers=dataclasses.replace(layers, **changed)),
    )


@dataclasses.dataclass(frozen=True)
class _Repeat:
    """Each kv head several times, one after the other."""

    axis: int
    times: int
    size: int

    def __call__(self, block: Array) -> Array:
        return jnp.repeat(block.reshape(*block.shape[: self.axis], -1, self.size), self.times, axis=self.axis)


@dataclasses.dataclass(frozen=True)
class _Regroup:
    """Query heads in smaller groups; ``after`` axes follow those of the heads."""

    axis: int
    group: int
    size: int
    after: int

    def __call__(self, block: Array) -> Array:
        behind = block.shape[block.ndim - self.after :]
        return block.reshape(*block.shape[: self.axis], -1, self.group, self.size, *behind)


@dataclasses.dataclass(frozen=True)
class _Then:
    """One function after another."""

    first: Assemble
    second: Assemble

    def __call__(self, *blocks: jax.Array) -> Array:
        return self.second(self.first(*blocks))
