"""Weights in 8 bits with a scale for each output channel, made while they are resharded.

A weight is ``values * scale``. All numbers that one output of the product is a sum over have the same scale: their
largest absolute value over the largest number of the type (symmetric, per channel: Nagel et al. 2021,
https://arxiv.org/abs/2106.08295, section 2.2). So the product is taken with the values and scaled afterwards, and no
array has the weight in more bits.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from lockstep.placement.decode_mesh import DecodeMesh
from lockstep.placement.device import BYTE, FP8, LARGEST_FP8, as_numbers
from lockstep.placement.leaf_layout import LayoutTree, LeafLayout, Spec

INT8: Final = jnp.dtype(jnp.int8)

_LARGEST: Final[Mapping[Any, float]] = {INT8: 127.0, FP8: LARGEST_FP8}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight in 8 bits; the axes of its inputs come first, after the layer."""

    values: Int8[Array, "*shape"] | UInt8[Array, "*shape"]  # integers, or the bytes of E4M3 numbers
    scale: Float[Array, "*outputs"]  # the factor of each output channel


def matmul(x: Float[Array, "*batch inputs"], weight: Array | QuantizedWeight, *, axes: int = 1) -> Array:
    """Return ``x @ weight``, one plain matrix product on every backend, with flattened axes of the weight.

    The TPU compiler widens the values of a `QuantizedWeight` where the product reads them, and scales its result.

    Args:
        axes: The number of its first axes that the product sums over; -1 for all but the last.
    """
    values = weight.values if isinstance(weight, QuantizedWeight) else weight
    values = values.reshape(math.prod(values.shape[:axes]), -1)
    if not isinstance(weight, QuantizedWeight):
        return x @ values
    product = jnp.matmul(x, as_numbers(values).astype(x.dtype), preferred_element_type=jnp.float32)
    return (product * weight.scale.reshape(-1)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class QuantizedLayout:
    """The layout of a weight that is kept in 8 bits; it takes the place of a `LeafLayout` in a `LayoutTree`."""

    values: LeafLayout
    inputs: tuple[int, ...]  # the axes that products sum over, counted from the last (-1), as those of one layer are
    dtype: jnp.dtype  # `int8` or `float8_e4m3fn`

    @property
    def decode_mesh(self) -> DecodeMesh:
        """The decode mesh."""
        return self.values.decode_mesh

    @property
    def spec(self) -> Spec:
        """For each axis of the weight, the axes of the decode mesh that split it."""
        return self.values.spec

    @property
    def tensor_dim(self) -> int | None:
        """The axis that the devices of a replica are to split."""
        return self.values.tensor_dim

    @property
    def scale(self) -> LeafLayout:
        """The layout of the scales."""
        kept = self._kept(range(len(self.spec)))
        return LeafLayout(
            self.decode_mesh,
            tuple(self.spec[dim] for dim in kept),
            kept.index(self.tensor_dim) if self.tensor_dim in kept else None,
        )

    @property
    def partition_spec(self) -> QuantizedWeight:
        """The partition specs of values and scales."""
        return QuantizedWeight(self.values.partition_spec, self.scale.partition_spec)  # type: ignore[arg-type]

    @property
    def decode(self) -> "QuantizedLayout":
        """The same weight in the decode layout."""
        return dataclasses.replace(self, values=self.values.decode)

    def drop_layer(self) -> "QuantizedLayout":
        """The layout of one layer of a stacked weight."""
        return dataclasses.replace(self, values=self.values.drop_layer())

    def read(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Inside ``shard_map``: this device's part in the decode layout, from its block in this layout."""
        return QuantizedWeight(self.values.read(weight.values), self.scale.read(weight.scale))

    def quantize(self, block: Float[Array, "*shape"]) -> QuantizedWeight:
        """Inside ``shard_map``: this device's block in 8 bits; the scales are those of whole channels on every device.

        Args:
            block: The block of this device, in the dtype of the parameters. A channel in which a number is not finite
                has no finite number afterwards.
        """
        wide = block.astype(jnp.float32)
        largest = jnp.max(jnp.abs(wide), axis=self.inputs)
        largest = jnp.where(jnp.isnan(largest), jnp.inf, largest)  # not every backend's pmax returns a NaN
        across = tuple(axis for dim in self.inputs for axis in self.spec[dim])
        if across:
            largest = jax.lax.pmax(largest, across)
        # A channel of zeros has the least normal number.
        scale = jnp.maximum(largest / _LARGEST[self.dtype], jnp.finfo(jnp.float32).tiny)
        exact = wide / jnp.expand_dims(scale, self.inputs)
        if self.dtype == INT8:
            return QuantizedWeight(jnp.round(exact).astype(INT8), scale)
        return QuantizedWeight(jax.lax.bitcast_convert_type(exact.astype(FP8), BYTE), scale)

    def bytes(self, dims: tuple[int, ...]) -> int:
        """Bytes of a block of the weight: of its values, and of its scales in float32."""
        return math.prod(dims) + 4 * math.prod(dims[dim] for dim in self._kept(range(len(dims))))

    def _kept(self, dims: range) -> list[int]:
        """The axes that scales have."""
        return [dim for dim in dims if dim - len(dims) not in self.inputs]


def quantized_layouts(
    layouts: LayoutTree, dtype: jnp.dtype, inputs: Callable[[str, int], tuple[int, ...]]
) -> LayoutTree:
    """Layouts with a `QuantizedLayout` in place of that of each stacked weight that is multiplied.

    Args:
        layouts: The layouts of the weights; the last entry of a leaf's path is its name.
        dtype: ``int8`` or ``float8_e4m3fn``.
        inputs: A function of the name of a weight and the number of its axes that returns the axes that products sum
            over, counted from the last; () for a weight that stays as it is.
    """

    def changed(path: tuple[Any, ...], layout: LeafLayout) -> LeafLayout | QuantizedLayout:
        dims = inputs(path[-1].name, len(layout.spec))
        return QuantizedLayout(layout, dims, dtype) if dims else layout

    return jax.tree_util.tree_map_with_path(changed, layouts)
