"""A model with its kv heads repeated, where more devices than it has of them share a copy of the weights."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from lockstep.errors import ConfigError
from lockstep.models import WEIGHT_AXES, DecoderWeights, LlamaConfig, attention_of
from lockstep.placement import Assemble, LazyWeight, axis_specs, resharded


def replicates_kv_heads(config: LlamaConfig, tensor: int) -> bool:
    """Whether ``tensor`` devices need each kv head several times, and can divide its query heads."""
    kv, group = config.num_kv_heads, config.q_heads_per_group
    return tensor > kv and tensor % kv == 0 and group % (tensor // kv) == 0


def replicate_kv_heads(config: LlamaConfig, weights: DecoderWeights, tensor: int) -> tuple[LlamaConfig, DecoderWeights]:
    """The model as ``tensor`` devices see it: with a kv head for each of them, repeated where it has fewer.

    Args:
        weights: Arrays, shape structs or `LazyWeight`; nothing is launched or copied.

    Returns:
        Both unchanged where there are enough kv heads; else a model with ``tensor`` kv heads that computes the same,
        whose weights are made while they are resharded.

    Raises:
        ConfigError: The trainer has a weight split inside a kv head.
    """
    repeated = {kind for kind, of in config.heads_by_kind.items() if replicates_kv_heads(of, tensor)}
    if not repeated:
        return config, weights
    layers = weights.layers

    def replicate(name: str) -> Any:
        leaf, (_, *axes), kind = getattr(layers, name), WEIGHT_AXES[name], attention_of(name)
        if leaf is None or "kv_head" not in axes or kind not in repeated:
            return leaf
        of = config.of_attention(kind)
        times, size = tensor // of.num_kv_heads, of.head_size
        sizes = {"group": of.q_heads_per_group // times, "head": size, "gated_head": 2 * size}
        axis = axes.index("kv_head")
        heads = tuple(sizes[axis_name] for axis_name in axes if axis_name in sizes)
        behind = len(axes) - axis - 1 - len(heads)
        assemble: Assemble = _Regroup(axis, heads, behind) if "group" in axes else _Repeat(axis, times, size)
        spec = axis_specs(leaf)
        sharding = getattr(leaf, "sharding", None)
        pieces = 1
        if isinstance(sharding, NamedSharding) and spec[axis + 1] is not None:
            names = spec[axis + 1] if isinstance(spec[axis + 1], tuple) else (spec[axis + 1],)
            pieces = math.prod(sharding.mesh.shape[mesh_axis] for mesh_axis in names)
        inside = spec[axis + 2 : len(spec) - behind]
        if of.num_kv_heads % pieces or any(part is not None for part in inside):
            raise ConfigError(
                f"layout {{tensor: {tensor}}} needs each of the {of.num_kv_heads} kv heads on {times} devices, and "
                f"the trainer has the weight {name} cut inside a kv head: {sharding}. Set tensor to at most "
                f"{of.num_kv_heads}."
            )
        lazy = isinstance(leaf, LazyWeight)
        return LazyWeight(
            parts=leaf.parts if lazy else (leaf,),
            assemble=_Then(leaf.assemble, assemble) if lazy else assemble,
            shape=(*leaf.shape[: axis + 1], tensor, *heads, *leaf.shape[leaf.ndim - behind :]),
            dtype=leaf.dtype,
            sharding=resharded(leaf, (*spec[: axis + 2], *(None for _ in heads), *spec[len(spec) - behind :])),
            stacked=True,
            **({name: getattr(leaf, name) for name in ("by_layer", "blocks", "layer_axis")} if lazy else {}),
        )

    changed = {field.name: replicate(field.name) for field in dataclasses.fields(layers)}
    return (
        config.with_kv_heads(dict.fromkeys(repeated, tensor)),
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
    heads: tuple[int, ...]
    after: int

    def __call__(self, block: Array) -> Array:
        behind = block.shape[block.ndim - self.after :]
        return block.reshape(*block.shape[: self.axis], -1, *self.heads, *behind)


@dataclasses.dataclass(frozen=True)
class _Then:
    """One function after another."""

    first: Assemble
    second: Assemble

    def __call__(self, *blocks: jax.Array) -> Array:
        return self.second(self.first(*blocks))
