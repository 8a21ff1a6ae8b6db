"""The kinds of layers that one model has: the owner of what layers may differ in, their heads above all.

Whoever needs the heads of a layer asks `KindsOfLayers.of_attention` for the configuration that layers of its kind see,
and reads them there: weights, trainer, decoder, the pool of pages, sizing and `lockstep plan` assume nothing else.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lockstep.models import block
from lockstep.models.delta_rule import LinearAttention
from lockstep.models.experts import Experts
from lockstep.models.latent import Latent
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import LayerType, Variant
from lockstep.models.weights import attention_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The settings in which layers of one model may differ."""

    window: int | None  # number of positions that a query attends to, its own included; None for all
    rope: RotaryConfig
    attention: str = "full"  # the kind of `KindsOfLayers.of_attention` that has its heads


class KindsOfLayers:
    """The part of a configuration that says how layers differ, and the sizes of the heads of each kind."""

    max_seq_len: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None
    rope: RotaryConfig
    variant: Variant
    experts: Experts | None

    @property
    def linear_attention(self) -> LinearAttention | None:
        """The layers with linear attention; a field of Qwen3-Next, and None in others."""
        return None

    @property
    def latent(self) -> Latent | None:
        """The latent that keys and values of all heads are made of; a field of DeepSeek V3, and None in others."""
        return None

    norms_values: ClassVar[bool] = False
    """Whether an RMSNorm without a weight comes after the projection of values (Gemma 4)."""
    layer_scalars: ClassVar[bool] = False
    """Whether the stream after each layer is multiplied by a number of the layer, which is not trained (Gemma 4)."""

    @property
    def keys_are_values(self) -> bool:
        """Whether wide heads have no projection of values, which are the keys before their norm and rotation."""
        return False

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer: ``full`` over positions, ``linear``, or ``wide`` with heads of another
        size.
        """
        linear = self.linear_layers
        return tuple("linear" if layer in linear else "full" for layer in range(self.num_layers))

    def of_attention(self, kind: str) -> Self:
        """The configuration as layers of one of `attention_kinds` see it, with the sizes of their heads."""
        return self

    def with_kv_heads(self, counts: Mapping[str, int]) -> Self:
        """The configuration with other numbers of key/value heads, by the kind, whose size stays."""
        changed: dict[str, Any] = {}
        if "full" in counts:
            changed = {"num_kv_heads": counts["full"], "head_dim": self.head_size}
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]  # a dataclass extends this

    @property
    def heads_by_kind(self) -> dict[str, Self]:
        """The configurations of the kinds that have heads of keys and values, by the kind."""
        return {kind: self.of_attention(kind) for kind in dict.fromkeys(self.attention_kinds) if kind != "linear"}

    @property
    def layer_types(self) -> tuple[LayerType, ...] | None:
        """The attention of each layer; None where all are of one kind."""
        types, every, linear = self.variant.layer_types, self.variant.full_attention_every, self.linear_attention
        if types is None and linear is not None:
            return every_nth_full(self.num_layers, linear.full_attention_every, "linear_attention")
        return types if every is None else every_nth_full(self.num_layers, every)

    @property
    def head_size(self) -> int:
        """The size of one attention head in elements."""
        return self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_size(self) -> int:
        """The elements of a head that may be rotated."""
        return self.head_size

    @property
    def value_size(self) -> int:
        """The size of one head's value in elements."""
        return self.head_size

    @property
    def pair_products(self) -> tuple[float, ...]:
        """The products of each layer's query heads for a pair of positions, of scores and of values on average."""
        of_layers = (self.of_attention(kind) for kind in self.attention_kinds)
        return tuple(of.num_heads * (of.head_size + of.value_size) / 2 for of in of_layers)

    @property
    def kept_kv_heads(self) -> int:
        """The key/value heads of which a decoder keeps each position, and which devices can split."""
        return self.num_kv_heads

    @property
    def q_heads_per_group(self) -> int:
        """The number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_factor(self) -> float:
        """The factor of attention scores that comes with the rotary scaling of all layers; 1 where layers differ in it,
        and queries have it (`rotary_angles`).
        """
        factors = {kind.rope.score_factor for kind in layer_kinds(self)}
        return factors.pop() if len(factors) == 1 else 1.0

    @property
    def mixes_mlps(self) -> bool:
        """Whether some layers have an MLP and some experts."""
        return self.experts is not None and bool(self.experts.mlp_only_layers)

    @property
    def linear_layers(self) -> Sequence[int]:
        """The numbers of the layers with linear attention."""
        return tuple(layer for layer, kind in enumerate(self.layer_types or ()) if kind == "linear_attention")

    @property
    def mixed_parts(self) -> dict[str, tuple[str, ...]]:
        """The parts of a layer in which layers differ, and of each layer the field of `MixedAttention` and `MixedMlps`
        that has its own.
        """
        parts, kinds = {}, self.attention_kinds
        if len({*kinds}) > 1:
            parts["attention"] = kinds
        if self.experts is not None and (only := self.experts.mlp_only_layers):
            parts["mlp"] = tuple("dense" if layer in only else "sparse" for layer in range(self.num_layers))
        return parts

    def layers_of(self, weight: str) -> Sequence[int]:
        """The numbers of the layers that have a weight: all, unless layers differ in it."""
        kind, kinds = attention_of(weight), self.attention_kinds
        if kind is not None and {kind} != {*kinds}:
            return tuple(layer for layer, own in enumerate(kinds) if own == kind)
        layers = range(self.num_layers)
        return layers if self.experts is None else self.experts.layers_of(weight, layers)


def every_nth_full(layers: int, every: int, other: LayerType = "sliding_attention") -> tuple[LayerType, ...]:
    """The types of layers of which every n-th, counted from the first, has full attention."""
    return tuple(other if (layer + 1) % every else "full_attention" for layer in range(layers))


def layer_kinds(config: KindsOfLayers) -> tuple[LayerKind, ...]:
    """The kind of each layer; a window of ``max_seq_len`` positions or more is none."""
    variant, types = config.variant, config.layer_types
    window = variant.sliding_window
    window = None if window is None or window >= config.max_seq_len else window
    types = types or ("full_attention" if variant.sliding_window is None else "sliding_attention",) * config.num_layers
    none = RotaryConfig(linear_factor=math.inf)
    full = LayerKind(window=None, rope=config.rope if variant.full_rope else none)
    sliding = LayerKind(window=window, rope=variant.sliding_rope or config.rope)
    kinds = [sliding if type_ == "sliding_attention" else full for type_ in types]
    if (every := variant.no_rope_every) is not None:
        kinds[every - 1 :: every] = [dataclasses.replace(kind, rope=none) for kind in kinds[every - 1 :: every]]
    own = (attention if attention in config.heads_by_kind else "full" for attention in config.attention_kinds)
    return tuple(dataclasses.replace(kind, attention=name) for kind, name in zip(kinds, own, strict=True))


def distinct[T: Hashable](values: Iterable[T]) -> tuple[tuple[T, ...], tuple[int, ...]]:
    """The values that layers have, in the order of their first, and which of them each one has."""
    every = tuple(values)
    kinds = tuple(dict.fromkeys(every))
    return kinds, tuple(map(kinds.index, every))


def rotary_frequencies(config: KindsOfLayers, rope: RotaryConfig | None = None) -> Float[np.ndarray, " half_head"]:
    """Return the rotary frequency of each pair of elements of a head, in radians per token; None: ``config.rope``."""
    return (config.rope if rope is None else rope).frequencies(config.rotary_size)


def rotary_angles(config: KindsOfLayers, kinds: Sequence[LayerKind], positions: Array) -> Float[Array, "... half"]:
    """The angles of positions in layers of some kinds, of which `rotary` makes what a layer reads."""
    frequencies = [rotary_frequencies(config.of_attention(kind.attention), kind.rope) for kind in kinds]
    return block.rope_angles(positions, frequencies, _query_factors(config, kinds))


def rotary(
    config: KindsOfLayers, angles: Float[Array, "... half"], apply: block.Elementwise = lambda turn, x: turn(x)
) -> block.Rotary:
    """Cosines and sines of `rotary_angles` of one kind or of all, and the factor of queries.

    Args:
        config: That of the heads, which may have fewer pairs than others that the angles are of too.
        apply: Applies cosine and sine.
    """
    pairs = config.rope.rotated(config.rotary_size) // 2
    more = angles.shape[-1] > pairs
    factor = angles[..., -1:] if more and _query_factors(config, layer_kinds(config)) is not None else None
    angles = angles[..., :pairs] if more else angles
    return block.Rotary(apply(jnp.cos, angles), apply(jnp.sin, angles), factor)


def _query_factors(config: KindsOfLayers, kinds: Sequence[LayerKind]) -> list[block.QueryFactors] | None:
    """The factors of queries of some kinds; None where all are 1."""
    factors = list[block.QueryFactors]()
    for kind in kinds:
        table, count = kind.rope.query_factors(config.max_seq_len)
        factors.append(((table * (kind.rope.score_factor / config.score_factor)).astype(np.float32), count))
    return None if all(np.all(table == 1) for table, _ in factors) else factors
