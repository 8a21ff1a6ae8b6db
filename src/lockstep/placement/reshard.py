"""The programs that move weights from the training layout to the decode layout, and make those that are lazy.

Explicit collectives inside a scan over layers keep the temporaries at one layer's size; an identity jit with new
output shardings gathers whole stacked leaves (docs/architecture.md, "Resharding").
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from lockstep.placement.lazy_weight import Assemble, WeightSpec, block_sources, sources, weight_specs
from lockstep.placement.leaf_layout import LayoutTree, LeafLayout, drop_layers, partition_specs, read, source_name
from lockstep.placement.quantized_weight import QuantizedLayout, QuantizedWeight


def reshard_function(
    layouts: LayoutTree, dtype: jnp.dtype, *, gather: bool
) -> tuple[Callable[..., PyTree], LayoutTree]:
    """The program that casts the weights and, with ``gather``, moves them to the decode layout.

    Args:
        layouts: The layouts of the weights in place; of stacked ones also `QuantizedLayout`.
        dtype: The floating dtype to decode in; weights are cast, or quantized, before anything moves.
        gather: Whether to move them; otherwise they stay in place and each step reads through the layouts.

    Returns:
        The traceable function of the weights, and the layouts of what it returns.
    """
    if not gather and not any(isinstance(leaf, QuantizedLayout) for leaf in jax.tree.leaves(layouts)):
        return lambda weights: jax.tree.map(lambda leaf: leaf.astype(dtype), weights), layouts
    target = jax.tree.map(lambda leaf: leaf.decode, layouts) if gather else layouts
    decode_mesh = jax.tree.leaves(layouts)[0].decode_mesh

    def made(layouts: Any, tree: Any) -> Any:
        blocks = jax.tree.map(
            lambda leaf, block: leaf.quantize(block) if isinstance(leaf, QuantizedLayout) else cast(block, dtype),
            layouts,
            tree,
        )
        return read(layouts, blocks) if gather else blocks

    def move(weights: Any) -> Any:
        outer = jax.tree.map(
            lambda leaf, block: read_by_pieces(leaf, block, dtype) if gather else cast(block, dtype),
            dataclasses.replace(layouts, layers=None),
            dataclasses.replace(weights, layers=None),
        )
        layers = weights.layers
        if not any(isinstance(leaf, QuantizedLayout) for leaf in jax.tree.leaves(layouts)):
            layers = jax.tree.map(
                lambda leaf, block: cast(block, dtype) if leaf.spec[0] else block, layouts.layers, layers
            )
        moved = _layer_by_layer(made, layers, drop_layers(layouts.layers), stages=layouts.layers)
        return dataclasses.replace(outer, layers=moved)

    moved = jax.shard_map(
        move,
        mesh=decode_mesh.mesh,
        in_specs=(jax.tree.map(lambda leaf: PartitionSpec(*(axes or None for axes in leaf.spec)), layouts),),
        out_specs=partition_specs(target),
        check_vma=False,
    )
    return moved, target


def assembly_function(
    weights: PyTree, layouts: LayoutTree, dtype: jnp.dtype, *, gather: bool
) -> tuple[Callable[..., PyTree], LayoutTree]:
    """`reshard_function` for weights of which some are yet to be made of what the trainer has (`LazyWeight`).

    Each is made of the blocks in place, layer by layer, and then moved.

    Args:
        weights: Arrays, shape structs or `LazyWeight`; not kept.

    Returns:
        The traceable function of `sources(weights)`, and the layouts of what it returns.

    Raises:
        ConfigError: A part is placed where the decode mesh cannot express it; named by its path.
    """
    decode_mesh = jax.tree.leaves(layouts)[0].decode_mesh
    target = jax.tree.map(lambda leaf: leaf.decode, layouts) if gather else layouts
    have = jax.tree.map(decode_mesh.expressed, sources(weights))
    want = jax.tree_util.tree_map_with_path(
        lambda path, leaf: decode_mesh.training_spec(leaf, source_name(path)), block_sources(weights)
    )
    # What is needed whole is gathered a layer at a time, by `GatheredParts`; XLA moves the rest beforehand.
    specs = jax.tree.map(_with_gathers, weight_specs(weights), have, want)
    partitions = jax.tree.map(_taken_specs, weight_specs(weights), have, want)

    def move(parts: Any) -> Any:
        def stored(layout: LeafLayout | QuantizedLayout, block: jax.Array) -> jax.Array | QuantizedWeight:
            return layout.quantize(block) if isinstance(layout, QuantizedLayout) else block.astype(dtype)

        def made(spec: Any, layout: LeafLayout | QuantizedLayout, part: Any) -> jax.Array | QuantizedWeight:
            block = stored(layout, spec.assemble(*part))
            return layout.read(block) if gather else block  # type: ignore[arg-type]

        outer = jax.tree.map(made, *(dataclasses.replace(tree, layers=None) for tree in (specs, layouts, parts)))
        stacked = jax.tree.map(lambda spec, part: spec.layers(part), specs.layers, parts.layers)
        if any(leaf.spec[0] for leaf in jax.tree.leaves(layouts.layers)):
            whole = jax.tree.map(
                lambda spec, layout, part: stored(layout, jax.vmap(spec.assemble)(*part)),
                specs.layers,
                layouts.layers,
                stacked,
            )
            return dataclasses.replace(outer, layers=read(layouts.layers, whole) if gather else whole)
        make = functools.partial(jax.tree.map, made)
        layers = _layer_by_layer(make, stacked, specs.layers, drop_layers(layouts.layers))
        return dataclasses.replace(outer, layers=layers)

    moved = jax.shard_map(
        move, mesh=decode_mesh.mesh, in_specs=(partitions,), out_specs=partition_specs(target), check_vma=False
    )
    return moved, target


def _layer_by_layer(make: Callable[..., Any], stacked: Any, *trees: Any, stages: Any = None) -> Any:
    """Make the weights of all layers, those of each number of layers in a loop.

    Args:
        make: Takes ``trees`` and the weights of a layer.
        stacked: The weights, their first axis the layer: a dataclass, in which None is no weight.
        trees: Instances of the same dataclass.
        stages: The layouts of the weights, where their layers may be split: a layer of each stage is then gathered in
            place, so that stages send each number once, and made.
    """
    names = [field.name for field in dataclasses.fields(stacked) if getattr(stacked, field.name) is not None]
    kinds = {
        name: (len(jax.tree.leaves(getattr(stacked, name))[0]), getattr(stages, name).spec[0] if stages else ())
        for name in names
    }

    def made(count: int, axes: tuple[str, ...]) -> dict[str, Any]:
        absent = {name: None for name in names if kinds[name] != (count, axes)}
        part, *rest = (dataclasses.replace(tree, **absent) for tree in (stacked, *trees))

        def make_all(layers: Any) -> Any:
            return jax.lax.scan(lambda _, layer: (None, make(*rest, layer)), None, layers)[1]

        def of_stages(index: jax.Array | int) -> Any:
            return make_all(jax.tree.map(lambda array: jax.lax.all_gather(array[index], axes), part))

        def add(index: jax.Array, out: Any) -> Any:
            return jax.tree.map(lambda whole, own: whole.at[:, index].set(own), out, of_stages(index))

        if axes:
            shapes = jax.eval_shape(of_stages, 0)
            out = jax.tree.map(lambda shape: jnp.zeros((len(shape), count, *shape.shape[1:]), shape.dtype), shapes)
            out = jax.lax.fori_loop(0, count, add, out)
            done = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), out)
        else:
            done = make_all(part)
        return {name: getattr(done, name) for name in names if kinds[name] == (count, axes)}

    stacks = [made(*kind) for kind in sorted(set(kinds.values()))]
    return dataclasses.replace(stacked, **dict(itertools.chain(*(weights.items() for weights in stacks))))


type Gathers = tuple[tuple[int, tuple[str, ...]], ...]
"""Axes of an array, and the mesh axes that split each."""


@dataclasses.dataclass(frozen=True)
class GatheredParts:
    """The assembly of a weight of which some parts are needed whole where devices share them."""

    assemble: Assemble  # makes the weight from its parts
    gathers: tuple[Gathers, ...]  # for each part the axes to gather

    def __call__(self, *parts: jax.Array) -> jax.Array:
        """The weight from the blocks of a device, inside ``shard_map``."""
        whole = []
        for part, gathers in zip(parts, self.gathers, strict=True):
            for axis, names in gathers:
                part = jax.lax.all_gather(part, names, axis=axis, tiled=True)
            whole.append(part)
        return self.assemble(*whole)


def _with_gathers(spec: WeightSpec, have: Any, want: Any) -> WeightSpec:
    """The function that makes a weight from the blocks in place, where other ones are wanted."""
    gathers = tuple(part_gathers or () for part_gathers in _gathers(spec, have, want))
    return dataclasses.replace(spec, assemble=GatheredParts(spec.assemble, gathers)) if any(gathers) else spec


def _taken_specs(spec: WeightSpec, have: Any, want: Any) -> tuple[Any, ...]:
    """The partition specs with which the parts of a weight come into the program."""
    gathers = _gathers(spec, have, want)
    return tuple(
        placed if part_gathers is None else stored
        for part_gathers, stored, placed in zip(gathers, have, want, strict=True)
    )


def _gathers(spec: WeightSpec, have: Any, want: Any) -> list[Gathers | None]:
    """For each part the axes of a layer that are split and needed whole; None where more than that is to be done."""
    layer, by_part = spec.layer_axis if spec.stacked and not spec.by_layer else None, list[Gathers | None]()
    for parts in zip(have, want, strict=True):
        if None in (layers := parts[0] if spec.by_layer else parts[:1]) or len(set(layers)) > 1:
            by_part.append(None)
            continue
        stored, placed = ([*(part[0] if spec.by_layer else part)] for part in parts)
        count = max(len(stored), len(placed))
        pairs = list(zip(*(side + [None] * (count - len(side)) for side in (stored, placed)), strict=True))
        changed = [(axis, split, needed) for axis, (split, needed) in enumerate(pairs) if split != needed]
        possible = all(axis != layer and needed is None for axis, _, needed in changed)
        behind = len(pairs) if layer is None else layer  # axes behind the layer's are one less in a layer
        gathers = tuple((axis - (axis > behind), split) for axis, split, _ in changed)
        by_part.append(gathers if possible else None)
    return by_part


PIECE_BYTES = 32 << 20
"""The most bytes that a piece of a moved weight has, once it is whole."""


def cast(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``array.astype(dtype)``, written so that the compiler does not move it.

    XLA moves a conversion of a slice in front of the slice, and then out of the loop: a scan that casts a layer at a
    time begins with a copy of all layers in the other type. It does not move arithmetic. From float32 to bfloat16,
    rounding is a ``reduce_precision``, and the rest takes the upper half of each word.
    """
    if array.dtype != jnp.float32 or jnp.dtype(dtype) != jnp.bfloat16:
        return array.astype(dtype)
    words = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(array, 8, 7), jnp.uint32)
    return jax.lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), jnp.bfloat16)


def read_by_pieces(layout: LeafLayout, block: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`LeafLayout.read` of a cast block, in a loop over pieces of its first axis.

    A device's block in the decode layout has the same bytes; beside it there is one piece, cast and being moved. What
    does not divide, or is split on the axis that decoding splits too, is read whole.

    Args:
        dtype: The dtype that the block is cast to before anything moves.
    """
    whole = jax.eval_shape(lambda array: layout.read(array.astype(dtype)), block)
    pieces = -(-whole.size * whole.dtype.itemsize // PIECE_BYTES)
    if layout == layout.decode or pieces < 2:
        return layout.read(cast(block, dtype))
    own = layout.decode_mesh.tensor if layout.tensor_dim == 0 else 1
    if layout.spec[0] and own > 1 or block.shape[0] % own:
        return layout.read(cast(block, dtype))
    # The first axis of the block is ``own`` parts, of which each device of the replica gets one; or that of the whole
    # is the blocks of several devices. A piece is some rows of every part, and ends up as some rows of every block.
    rows = block.shape[0] // own
    count = next((n for n in range(pieces, rows) if rows % n == 0), rows)  # a row at a time where there are too few
    size = rows // count
    blocks = whole.shape[0] // rows

    def move(index: jax.Array, out: jax.Array) -> jax.Array:
        taken = [jax.lax.dynamic_slice_in_dim(block, part * rows + index * size, size) for part in range(own)]
        piece = layout.read(cast(jnp.concatenate(taken) if own > 1 else taken[0], dtype))
        placed = piece.reshape(blocks, size, *whole.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(out, placed, index * size, axis=1)

    out = jnp.zeros((blocks, rows, *whole.shape[1:]), whole.dtype)
    return jax.lax.fori_loop(0, count, move, out).reshape(whole.shape)
