"""From the training layout to the decode layout: which device holds which part of each weight, and how it gets there.

Explicit collectives inside a scan over layers keep the temporaries at one layer's size; an identity jit with new
output shardings gathers whole stacked leaves (docs/weights-and-layouts.md, "Resharding").
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from lockstep.placement.chunked_cast import cast, read_by_pieces
from lockstep.placement.lazy_weight import sources, weight_specs
from lockstep.placement.leaf_layout import LayoutTree, LeafLayout, drop_layers, partition_specs, read


def reshard_function(
    layouts: LayoutTree, dtype: jnp.dtype, *, gather: bool
) -> tuple[Callable[..., PyTree], LayoutTree]:
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
    decode_mesh = jax.tree.leaves(layouts)[0].decode_mesh

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
        mesh=decode_mesh.mesh,
        in_specs=(partition_specs(layouts),),
        out_specs=partition_specs(target),
        check_vma=False,
    )
    return moved, target


def assembly_function(
    weights: PyTree, layouts: LayoutTree, dtype: jnp.dtype, *, gather: bool
) -> tuple[Callable[..., PyTree], LayoutTree]:
    """`reshard_function` for weights of which some are yet to be made of what the trainer holds (`LazyWeight`).

    Each is made of the blocks where they lie, layer by layer, and then moved.

    Args:
        weights: arrays, shape structs or `LazyWeight`; not kept.
        layouts: of the weights as the decoder sees them.
        dtype: floating dtype to decode in.
        gather: whether to move them.

    Returns:
        The traceable function of `sources(weights)`, and the layouts of what it returns.

    Raises:
        ConfigError: a part lies somewhere the decode mesh cannot express; named by its path.
    """
    plans = weight_specs(weights)
    decode_mesh = jax.tree.leaves(layouts)[0].decode_mesh
    target = jax.tree.map(lambda leaf: leaf.decode, layouts) if gather else layouts
    specs = jax.tree_util.tree_map_with_path(
        lambda path, leaf: decode_mesh.training_spec(leaf, jax.tree_util.keystr(path)), sources(weights)
    )

    def move(parts: Any) -> Any:
        def made(plan: Any, layout: LeafLayout, part: Any) -> jax.Array:
            block = plan.assemble(*part).astype(dtype)
            return layout.read(block) if gather else block

        outer = jax.tree.map(made, *(dataclasses.replace(tree, layers=None) for tree in (plans, layouts, parts)))
        stacked = jax.tree.map(lambda plan, part: plan.layers(part), plans.layers, parts.layers)
        if any(leaf.spec[0] for leaf in jax.tree.leaves(layouts.layers)):
            whole = jax.tree.map(lambda plan, part: jax.vmap(plan.assemble)(*part).astype(dtype), plans.layers, stacked)
            return dataclasses.replace(outer, layers=read(layouts.layers, whole) if gather else whole)
        one = drop_layers(layouts.layers)
        _, layers = jax.lax.scan(lambda _, layer: (None, jax.tree.map(made, plans.layers, one, layer)), None, stacked)
        return dataclasses.replace(outer, layers=layers)

    moved = jax.shard_map(
        move, mesh=decode_mesh.mesh, in_specs=(specs,), out_specs=partition_specs(target), check_vma=False
    )
    return moved, target
