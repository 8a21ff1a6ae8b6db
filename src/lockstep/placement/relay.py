"""From the training layout to the decode layout: which device holds which part of each weight, and how it gets there.

Explicit collectives inside a scan over layers keep the temporaries at one layer's size; an identity jit with new
output shardings gathers whole stacked leaves (docs/architecture.md, "Re-laying weights").
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from lockstep.placement.layout import DecodeGrid
from lockstep.placement.move import cast, read_by_pieces
from lockstep.placement.stored import blueprints, sources

TENSOR_DIM = {
    "embed": 0,
    "lm_head": 1,
    "q": 2,
    "k": 2,
    "v": 2,
    "o": 1,
    "gate": 2,
    "up": 2,
    "down": 1,
    "q_bias": 1,
    "k_bias": 1,
    "v_bias": 1,
    "q_wide_norm": 1,
    "k_wide_norm": 1,
}
"""The axis of each weight (layer axis counted) that a replica's devices split: vocabulary, kv heads or mlp."""

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
type LayoutTree = Any
"""`DecoderWeights`, or a part of it, with a `LeafLayout` in place of each array."""


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """Where one weight lies and how a device gets the part of it that decoding needs.

    Args:
        grid: the decode grid.
        spec: for each axis of the weight, the grid axes that split it.
        tensor_dim: the axis that the devices of a replica are to split, or None for a copy on each.
    """

    grid: DecodeGrid
    spec: Spec
    tensor_dim: int | None

    @property
    def partition_spec(self) -> PartitionSpec:
        """Where the weight lies now."""
        return PartitionSpec(*(axes or None for axes in self.spec))

    @property
    def decode(self) -> "LeafLayout":
        """The same weight in the decode layout: split over the tensor axes, copied over the replicas."""
        tensor = self.grid.tensor_axes
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
        tensor, dim, spec = self.grid.tensor_axes, self.tensor_dim, list(self.spec)
        if dim is not None and tensor and not spec[dim] and block.shape[dim] % self.grid.tensor == 0:
            for other, axes in enumerate(spec):
                if axes[-len(tensor) :] == tensor:
                    # The replica's devices swap: each gives up a part of `other` for its part of the tensor axis.
                    block = jax.lax.all_to_all(block, tensor, split_axis=dim, concat_axis=other, tiled=True)
                    spec[other], spec[dim] = axes[: -len(tensor)], tensor
                    break
        for other, axes in enumerate(spec):
            if axes and not (other == dim and axes == tensor):
                block = jax.lax.all_gather(block, axes, axis=other, tiled=True)
        if dim is not None and tensor and spec[dim] != tensor:
            block = _own_part(block, dim, tensor, self.grid.tensor)
        return block


def _own_part(block: jax.Array, dim: int, axes: Axes, count: int) -> jax.Array:
    """The part of a whole axis that belongs to this device; a vocabulary that does not divide is padded with zeros."""
    size = -(-block.shape[dim] // count)
    padding = [(0, size * count - block.shape[d] if d == dim else 0) for d in range(block.ndim)]
    return jax.lax.dynamic_slice_in_dim(jnp.pad(block, padding), jax.lax.axis_index(axes) * size, size, axis=dim)


def leaf_layouts(weights: PyTree, grid: DecodeGrid) -> LayoutTree:
    """The layout of each weight as it lies now, as a pytree like ``weights`` with `LeafLayout` leaves.

    Args:
        weights: pytree of arrays or shape structs with shardings; a leaf's last path entry names it in `TENSOR_DIM`.
        grid: the decode grid over the same devices.

    Raises:
        ConfigError: a weight lies somewhere the grid cannot express; named by its path.
    """

    def layout(path: tuple[Any, ...], leaf: jax.Array | jax.ShapeDtypeStruct) -> LeafLayout:
        spec = grid.training_spec(leaf, jax.tree_util.keystr(path))
        axes = tuple(_axes(entry) for entry in spec) + ((),) * (leaf.ndim - len(spec))
        return LeafLayout(grid, axes, TENSOR_DIM.get(path[-1].name))

    return jax.tree_util.tree_map_with_path(layout, weights)


def partition_specs(layouts: LayoutTree) -> PyTree:
    """The partition spec of each leaf."""
    return jax.tree.map(lambda leaf: leaf.partition_spec, layouts)


def relay_function(layouts: LayoutTree, dtype: jnp.dtype, *, gather: bool) -> tuple[Callable[..., PyTree], LayoutTree]:
    """The program that casts the weights and, with ``gather``, moves them to the decode layout.

    Args:
        layouts: of the weights as they lie.
        dtype: floating dtype to decode in; cast before anything moves.
        gather: whether to move them; otherwise they stay where they are and each step reads through the layouts.

    Returns:
        The traceable function of the weights, and the layouts of what it returns.
    """
    if not gather:
        return lambda weights: jax.tree.map(lambda leaf: leaf.astype(dtype), weights), layouts
    target = jax.tree.map(lambda leaf: leaf.decode, layouts)
    grid = jax.tree.leaves(layouts)[0].grid

    def cast_all(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: cast(leaf, dtype), tree)

    def move(weights: Any) -> Any:
        outer = jax.tree.map(
            lambda leaf, block: read_by_pieces(leaf, block, dtype),
            dataclasses.replace(layouts, layers=None),
            dataclasses.replace(weights, layers=None),
        )
        if any(leaf.spec[0] for leaf in jax.tree.leaves(layouts.layers)):
            return dataclasses.replace(outer, layers=read(layouts.layers, cast_all(weights.layers)))
        one = drop_layers(layouts.layers)
        _, layers = jax.lax.scan(lambda _, layer: (None, read(one, cast_all(layer))), None, weights.layers)
        return dataclasses.replace(outer, layers=layers)

    moved = jax.shard_map(
        move,
        mesh=grid.mesh,
        in_specs=(partition_specs(layouts),),
        out_specs=partition_specs(target),
        check_vma=False,
    )
    return moved, target


def assembly_function(
    weights: PyTree, layouts: LayoutTree, dtype: jnp.dtype, *, gather: bool
) -> tuple[Callable[..., PyTree], LayoutTree]:
    """`relay_function` for weights of which some are yet to be made of what the trainer holds (`StoredWeight`).

    Each is made of the blocks where they lie, layer by layer, and then moved.

    Args:
        weights: arrays, shape structs or `StoredWeight`; not kept.
        layouts: of the weights as the decoder sees them.
        dtype: floating dtype to decode in.
        gather: whether to move them.

    Returns:
        The traceable function of `sources(weights)`, and the layouts of what it returns.

    Raises:
        ConfigError: a part lies somewhere the grid cannot express; named by its path.
    """
    plans = blueprints(weights)
    grid = jax.tree.leaves(layouts)[0].grid
    target = jax.tree.map(lambda leaf: leaf.decode, layouts) if gather else layouts
    specs = jax.tree_util.tree_map_with_path(
        lambda path, leaf: grid.training_spec(leaf, jax.tree_util.keystr(path)), sources(weights)
    )

    def move(parts: Any) -> Any:
        def made(plan: Any, layout: LeafLayout, part: Any) -> jax.Array:
            block = plan.recipe(*part).astype(dtype)
            return layout.read(block) if gather else block

        outer = jax.tree.map(made, *(dataclasses.replace(tree, layers=None) for tree in (plans, layouts, parts)))
        stacked = jax.tree.map(lambda plan, part: plan.layers(part), plans.layers, parts.layers)
        if any(leaf.spec[0] for leaf in jax.tree.leaves(layouts.layers)):
            whole = jax.tree.map(lambda plan, part: jax.vmap(plan.recipe)(*part).astype(dtype), plans.layers, stacked)
            return dataclasses.replace(outer, layers=read(layouts.layers, whole) if gather else whole)
        one = drop_layers(layouts.layers)
        _, layers = jax.lax.scan(lambda _, layer: (None, jax.tree.map(made, plans.layers, one, layer)), None, stacked)
        return dataclasses.replace(outer, layers=layers)

    moved = jax.shard_map(move, mesh=grid.mesh, in_specs=(specs,), out_specs=partition_specs(target), check_vma=False)
    return moved, target


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


def _axes(entry: Any) -> Axes:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
