"""Weights on several meshes of the same devices, seen on one of them: by reference where that means the same."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from lockstep.placement.lazy_weight import LazyWeight, struct_of, unchanged


def on_one_mesh(weights: PyTree) -> PyTree:
    """The same weights on the mesh of the first of them, whose axes become `AxisType.Auto`; nothing is launched.

    An array on another mesh of the same devices is seen on that mesh, by reference, where a partition spec there means
    the same. Where none does, it becomes a `LazyWeight` that is moved at the beginning of each round. Programs over
    other meshes need axes of the type Auto: ``shard_map`` over a decode mesh refuses the arrays of explicit ones.

    Args:
        weights: `DecoderWeights`, or another pytree of arrays, shape structs or `LazyWeight`.

    Returns:
        The weights; ``weights`` itself where all are on one mesh already.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(weights)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)]
    if not meshes:
        return weights
    mesh = _auto(meshes[0])

    def seen(sharding: Any, shape: Sequence[int]) -> Any:
        if getattr(sharding, "mesh", None) == mesh or getattr(sharding, "device_set", None) != set(mesh.devices.flat):
            return sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and _auto(sharding.mesh) == mesh:
            return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        return equivalent(sharding, tuple(shape), mesh) or sharding

    def array_on_mesh(leaf: Any) -> Any:
        have = getattr(leaf, "sharding", None)
        want = seen(have, leaf.shape)
        if want is have:
            return leaf
        if not isinstance(leaf, jax.Array):
            return struct_of(leaf, want)
        local = [shard.data for shard in leaf.addressable_shards]
        dtype = None if local else leaf.dtype  # that of float64 would be read as float32 where JAX has no 64 bits
        return jax.make_array_from_single_device_arrays(leaf.shape, want, local, dtype=dtype)

    def weight(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, LazyWeight):
            on_mesh = array_on_mesh(leaf)
            stacked = any(getattr(key, "name", None) == "layers" for key in path)
            return _moved(on_mesh, mesh, stacked) if _needs_move(on_mesh, mesh) else on_mesh
        first = [part[0] if leaf.by_layer else part for part in leaf.parts]
        blocks = leaf.blocks or (None,) * len(first)
        placed_blocks = [seen(block, part.shape) for block, part in zip(blocks, first, strict=True)]
        parts = jax.tree.map(array_on_mesh, leaf.parts)
        for at, part in enumerate(parts):
            if placed_blocks[at] is None and any(_needs_move(array, mesh) for array in jax.tree.leaves(part)):
                placed_blocks[at] = spread(
                    first[at].shape, mesh, layer=leaf.layer_axis if leaf.stacked and not leaf.by_layer else None
                )
        sharding = seen(leaf.sharding, leaf.shape)
        if not _is_on(sharding, mesh) and any(block is not None for block in placed_blocks):
            sharding = NamedSharding(mesh, PartitionSpec())
        same = sharding is leaf.sharding and all(a is b for a, b in zip(placed_blocks, blocks, strict=True))
        if same and all(a is b for a, b in zip(*map(jax.tree.leaves, (parts, leaf.parts)), strict=True)):
            return leaf
        made = tuple(placed_blocks) if any(block is not None for block in placed_blocks) else ()
        return dataclasses.replace(leaf, parts=parts, sharding=sharding, blocks=made)

    on_mesh = jax.tree_util.tree_map_with_path(weight, weights)
    same = all(a is b for a, b in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(weights), strict=True))
    return weights if same else on_mesh


@functools.lru_cache(maxsize=4096)
def equivalent(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding | None:
    """The sharding on ``mesh`` with which each device has the same part of an array; None where there is none."""
    where = sharding.devices_indices_map(shape)
    counts = [whole // max(part, 1) for whole, part in zip(shape, sharding.shard_shape(shape), strict=True)]
    for spec in _specs(counts, [name for name, size in mesh.shape.items() if size > 1], dict(mesh.shape)):
        candidate = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
        if candidate.devices_indices_map(shape) == where:
            return candidate
    return None


def _specs(counts: Sequence[int], names: list[str], sizes: dict[str, int]) -> Iterator[tuple[Any, ...]]:
    """Every partition spec that cuts the axes of an array into so many parts."""
    if not counts:
        yield ()
        return
    for length in range(len(names) + 1):
        for axes in itertools.permutations(names, length):
            if math.prod(sizes[name] for name in axes) == counts[0]:
                left = [name for name in names if name not in axes]
                entry = axes[0] if len(axes) == 1 else axes or None
                yield from ((entry, *rest) for rest in _specs(counts[1:], left, sizes))


def spread(shape: Sequence[int], mesh: Mesh, *, layer: int | None = None) -> NamedSharding:
    """A sharding of an array over all devices of a mesh, by one axis but the layer's; whole where none divides."""
    names = tuple(name for name, size in mesh.shape.items() if size > 1)
    for axis, size in enumerate(shape):
        if axis != layer and size % mesh.size == 0:
            return NamedSharding(mesh, PartitionSpec(*(None,) * axis, names or None))
    return NamedSharding(mesh, PartitionSpec())


def _moved(array: Array, mesh: Mesh, stacked: bool) -> LazyWeight:
    """A weight that is to be moved to a placement on ``mesh``, because what it has cannot be said there."""
    target = spread(array.shape, mesh, layer=0 if stacked else None)
    return LazyWeight((array,), unchanged, tuple(array.shape), array.dtype, target, stacked, blocks=(target,))


def _needs_move(array: Any, mesh: Mesh) -> bool:
    """Whether an array has the devices of a mesh in its order, and not on that mesh."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or _is_on(sharding, mesh):
        return False
    return list(sharding.mesh.devices.flat) == list(mesh.devices.flat)


def _is_on(sharding: Any, mesh: Mesh) -> bool:
    return getattr(sharding, "mesh", None) == mesh


def _auto(mesh: Mesh) -> Mesh:
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
