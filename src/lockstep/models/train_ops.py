"""The operations of a layer in training: named axes, which XLA shards."""

import dataclasses
from typing import Any, Self

import haliax as hax
import jax
from haliax import Axis, NamedArray
from jaxtyping import Array, Float

from lockstep.models import block
from lockstep.models.config import LlamaConfig
from lockstep.models.latent import LatentQueries, expanded
from lockstep.models.layer_kinds import rotary
from lockstep.models.layers import Attend, Ops
from lockstep.models.low_rank import AdaptedWeight, Weight, linear
from lockstep.models.weights import LayerWeights


@dataclasses.dataclass(frozen=True)
class Train(Ops):
    """`Ops` with weights that have named axes, and may have adapters.

    Args:
        rows: The axes of the rows, the position last.
    """

    config: LlamaConfig
    rows: tuple[Axis, ...]

    @classmethod
    def of(cls, config: LlamaConfig, x: NamedArray) -> Self:
        """For a stream with the axes ``position`` and ``embed``, and any others."""
        Position = x.resolve_axis("position")
        return cls(config, (*(axis for axis in x.axes if axis.name not in ("position", "embed")), Position))

    def rotary(self, angles: NamedArray) -> block.Rotary:
        """Cosines and sines of angles ``[half_head]`` with some of the axes of the rows, of one kind of layers."""
        own = [axis for axis in self.rows if axis in angles.axes]
        array = angles.rearrange((*own, "half_head")).array
        array = array.reshape([axis.size if axis in own else 1 for axis in self.rows] + [-1])
        return rotary(self.config, array)

    @property
    def epsilon(self) -> float:
        """See `Ops`; so for all methods."""
        return self.config.layer_norm_epsilon

    def array(self, weight: Any) -> Any:
        return None if weight is None else weight.array

    def columns(
        self, x: Array, weight: Weight, shape: tuple[int, ...], *, units: int, bias: NamedArray | None = None
    ) -> Float[Array, "..."]:
        inputs, *outputs = _axes(weight)
        product = linear(hax.named(x, (*self.rows, inputs)), weight, inputs)
        product = product if bias is None else product + bias
        return product.rearrange((*self.rows, *outputs)).array

    def part(self, x: Array, weight: Weight, *, units: int) -> Float[Array, "*row embed"]:
        *inputs, output = _axes(weight)
        return linear(hax.named(x, (*self.rows, *inputs)), weight, inputs).rearrange((*self.rows, output)).array

    def norm(self, x: Array, weight: NamedArray | None, *, wide: bool = False, epsilon: float | None = None) -> Array:
        return self.config.norm.with_epsilon(epsilon)(x, self.array(weight))

    def hidden(self, w: LayerWeights, up: Array, gate: Array | None) -> Array:
        xielu = tuple(map(self.array, (w.xielu_p, w.xielu_n, w.xielu_beta, w.xielu_eps)))
        return block.hidden(self.config.variant.activation, up, gate, xielu)

    def gate(self, x: Array, h: Array, weight: Weight) -> Array:
        return x * jax.nn.sigmoid(self.columns(h, weight, (1,), units=1))

    def attend_latent(self, q: LatentQueries, latent: Array, kv_b: Weight, attend: Attend) -> Array:
        inputs, *outputs = _axes(kv_b)
        heads, width = (axis.size for axis in outputs)
        kv = self.columns(latent[..., : inputs.size], kv_b, (heads, width), units=heads)
        queries, k, v = expanded(q, latent, kv)
        queries = self.shard(queries, "kv_head", "q_heads_per_group", "head_size")
        attended = attend(queries, self.shard(k, "kv_head", "head_size"), self.shard(v, "kv_head", "head_size"))
        return attended.reshape(*v.shape[:-1], 1, v.shape[-1])

    def shard(self, x: Array, *axes: str) -> Array:
        return hax.auto_sharded(hax.named(x, (*self.rows, *axes))).array


def _axes(weight: Weight) -> tuple[Axis, ...]:
    return (weight.weight if isinstance(weight, AdaptedWeight) else weight).axes
