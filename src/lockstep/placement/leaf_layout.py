"""The placement of a weight in training, and the way from there to the part that a device decodes with."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from lockstep.placement.decode_mesh import DecodeMesh
from lockstep.placement.lazy_weight import sources
from lockstep.placement.mesh import axes_of

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
type LayoutTree = Any
"""`DecoderWeights`, or a part of it, with a `LeafLayout` in place of each array."""


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The placement of a weight, and the way from there to the part that a device decodes with."""

    decode_mesh: DecodeMesh
    spec: Spec  # for each axis of the weight, the axes of the decode mesh that split it
    tensor_dim: int | None  # the axis that the devices of a replica are to split, or None for a copy on each
    lanes: int = 1  # the number of which each part of that axis becomes a multiple, by zeros at its end

    @property
    def partition_spec(self) -> PartitionSpec:
        """The partition spec of the weight in its current layout."""
        return PartitionSpec(*(axes or None for axes in self.spec))

    @property
    def decode(self) -> "LeafLayout":
        """The same weight in the decode layout: split over the tensor axes, copied over the replicas."""
        tensor = self.decode_mesh.tensor_axes
        spec = tuple(tensor if dim == self.tensor_dim else () for dim in range(len(self.spec)))
        return dataclasses.replace(self, spec=spec)

    def drop_layer(self) -> "LeafLayout":
        """The layout of one layer of a stacked weight."""
        dim = None if self.tensor_dim is None else self.tensor_dim - 1
        return dataclasses.replace(self, spec=self.spec[1:], tensor_dim=dim)

    def read(self, block: jax.Array) -> jax.Array:
        """Inside ``shard_map``: this device's part in the decode layout, from its block in this layout."""
        if self == self.decode:
            return block
        tensor, dim, spec = self.decode_mesh.tensor_axes, self.tensor_dim, list(self.spec)
        if dim is not None and tensor and not spec[dim] and block.shape[dim] % self.decode_mesh.tensor == 0:
            for axis, axes in enumerate(spec):
                if axes[-len(tensor) :] == tensor:
                    # The replica's devices swap: each gives up a part of `other` for its part of the tensor axis.
                    block = jax.lax.all_to_all(block, tensor, split_axis=dim, concat_axis=axis, tiled=True)
                    spec[axis], spec[dim] = axes[: -len(tensor)], tensor
                    break
        for axis, axes in enumerate(spec):
            if axes and not (axis == dim and axes == tensor):
                block = jax.lax.all_gather(block, axes, axis=axis, tiled=True)
        if dim is not None and tensor and spec[dim] != tensor:
            block = _own_part(block, dim, tensor, self.decode_mesh.tensor)
        return block if dim is None else _padded(block, dim, -block.shape[dim] % self.lanes)


def _padded(block: jax.Array, dim: int, zeros: int) -> jax.Array:
    return jnp.pad(block, [(0, zeros * (axis == dim)) for axis in range(block.ndim)]) if zeros else block


def _own_part(block: jax.Array, dim: int, axes: Axes, count: int) -> jax.Array:
    """The part of a whole axis that belongs to this device; a vocabulary that does not divide is padded with zeros."""
    size = -(-block.shape[dim] // count)
    whole = _padded(block, dim, size * count - block.shape[dim])
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(axes) * size, size, axis=dim)


def source_name(path: Sequence[Any]) -> str:
    """The name of a weight, or of an array of `sources`, for an error: the weight, and which of its arrays."""
    fields = ".".join(key.name for key in path if hasattr(key, "name"))
    part, *layer = [key.idx for key in path if hasattr(key, "idx")] or [0]
    return fields + f" (part {part})" * bool(part) + "".join(f" of layer {number}" for number in layer)


def leaf_layouts(
    weights: PyTree, decode_mesh: DecodeMesh, tensor_dims: Mapping[str, int], lanes: Mapping[str, int] | None = None
) -> LayoutTree:
    """The current layout of each weight, as a pytree like ``weights`` with `LeafLayout` leaves.

    Args:
        weights: A pytree of arrays or shape structs with shardings; the last entry of a leaf's path is its name.
        tensor_dims: The axis that the devices of a replica are to split, by the name of the weight. Weights that it
            does not name get a copy on each device.
        lanes: The number of which parts are to be a multiple, by the name of the weight.

    Raises:
        ConfigError: A weight is placed where the decode mesh cannot express it; the error names its path.
    """

    def layout(path: tuple[Any, ...], leaf: jax.Array | jax.ShapeDtypeStruct) -> LeafLayout:
        spec = decode_mesh.training_spec(leaf, source_name(path))
        axes = tuple(map(axes_of, spec)) + ((),) * (leaf.ndim - len(spec))
        name = path[-1].name
        return LeafLayout(decode_mesh, axes, tensor_dims.get(name), (lanes or {}).get(name, 1))

    for path, part in jax.tree_util.tree_leaves_with_path(sources(weights)):
        decode_mesh.check_devices(part, source_name(path))
    return jax.tree_util.tree_map_with_path(layout, weights)


def partition_specs(layouts: LayoutTree) -> PyTree:
    """The partition spec of each leaf."""
    return jax.tree.map(lambda leaf: leaf.partition_spec, layouts)


def drop_layers(layouts: LayoutTree) -> LayoutTree:
    """The layouts of one layer of stacked weights."""
    return jax.tree.map(lambda leaf: leaf.drop_layer(), layouts)


def read(layouts: LayoutTree, blocks: PyTree) -> PyTree:
    """`LeafLayout.read` for a whole pytree."""
    return jax.tree.map(lambda leaf, block: leaf.read(block), layouts, blocks)


def read_outer(layouts: LayoutTree, weights: PyTree) -> PyTree:
    """`read` for all but the stacked layers, which stay as they are."""
    outer = read(dataclasses.replace(layouts, layers=None), dataclasses.replace(weights, layers=None))
    return dataclasses.replace(outer, layers=weights.layers)
