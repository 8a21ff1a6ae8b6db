"""The block of the trainable model on named axes: those of weights, norms, rotary embeddings, output layer."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lockstep.models import block
from lockstep.models.attention import SplitPositions
from lockstep.models.config import LlamaConfig
from lockstep.models.layer_kinds import distinct, layer_kinds
from lockstep.models.layer_kinds import rotary_angles as angles_of
from lockstep.models.weight_sizes import sizes_of
from lockstep.models.weights import WEIGHT_AXES, haliax_axes
from lockstep.placement import PARAMETER_AXES, PP, compute_axes
from lockstep.placement.device import auto_axes


def weight_axes(config: LlamaConfig, name: str) -> tuple[Axis, ...]:
    """Return the axes of one layer's part of a weight, with the names that sharding rules use."""
    sizes = sizes_of(config, name)
    axes = zip(haliax_axes(name), WEIGHT_AXES[name], strict=True)
    return tuple(Axis(axis_name, sizes[axis]) for axis_name, axis in axes if axis != "layer")


def look_up(table: NamedArray, ids: NamedArray, split: SplitPositions | None = None) -> NamedArray:
    """Return the rows of a table ``[vocab, embed]`` sharded by the batch axes, and by ``split``."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = auto_axes(mesh)
    if split is None and len(axes) == len(mesh.axis_names) and PP not in axes:
        # A table sharded by embed would leave the stream sharded by embed, and XLA would replicate it.
        return hax.auto_sharded(table.take("vocab", ids))
    # Inside the shard_map over slices XLA aborts when it partitions a gather from a table split over two axes, and it
    # would replicate what comes from a table that is split over ``fsdp`` alone, where rows are split over stages or
    # positions too.
    rows, width, vocab = compute_axes(mesh, of_slice=True)["batch"], PARAMETER_AXES["embed"], PARAMETER_AXES["vocab"]

    def local(table: Array, ids: Array) -> Array:
        place = jax.lax.all_gather(ids, width, tiled=True) - jax.lax.axis_index(vocab) * len(table)
        own = (place >= 0) & (place < len(table))
        rows_ = jnp.where(own[..., None], table[jnp.clip(place, 0, len(table) - 1)], 0)
        return jax.lax.all_to_all(jax.lax.psum(rows_, vocab), width, 0, rows_.ndim - 1, tiled=True)

    tokens = PartitionSpec(rows, split and split.axis)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(vocab, width), tokens),
        out_specs=tokens,
        axis_names=axes,
        check_vma=False,
    )
    embed = table.resolve_axis("embed")
    return hax.named(mapped(table.rearrange(("vocab", "embed")).array, ids.array), (*ids.axes, embed))


def neutral(config: LlamaConfig, name: str) -> NamedArray:
    """Return the weight of a norm, by its name, that multiplies by 1."""
    axes = weight_axes(config, name)
    return hax.zeros(axes) if config.variant.norm_plus_one else hax.ones(axes)


def norm_gates(config: LlamaConfig, key: jax.Array, norm: str, has: bool = True) -> dict[str, NamedArray | None]:
    """Return random matrices of the gate of a norm, by their names."""
    sides, std = (f"{norm}_down", f"{norm}_up"), config.initializer_range
    if not has or config.variant.gated_norm_rank is None:
        return dict.fromkeys(sides)
    keys = zip(sides, jax.random.split(jax.random.fold_in(key, 2)), strict=True)
    return {name: hax.random.normal(own, weight_axes(config, name)) * std for name, own in keys}


def rotary_angles(config: LlamaConfig, positions: NamedArray) -> NamedArray:
    """Return the rotary angles of some positions.

    Returns:
        The angles in float32 radians ``[half_head]``, with the axes of ``positions`` in front; where layers differ,
        with ``layer_kind`` before all: one entry for each of their distinct kinds.
    """
    kinds, _ = distinct(layer_kinds(config))
    angles = angles_of(config, kinds, positions.array)
    return hax.named(angles, (*(["layer_kind"] if len(kinds) > 1 else []), *positions.axes, "half_head"))


def document_positions(Position: Axis, segment_ids: NamedArray | None) -> NamedArray:
    """Return the position of each token in its document; without ``segment_ids`` a row is one document."""
    if segment_ids is None:
        return hax.arange(Position)
    axes = (*(axis for axis in segment_ids.axes if axis != Position), Position)
    return hax.named(jnp.arange(Position.size) - block.document_starts(segment_ids.rearrange(axes).array), axes)


@jax.custom_vjp
def float32_logits(x: NamedArray, head: NamedArray) -> NamedArray:
    """Return logits ``[..., vocab]`` in float32, whose gradient is rounded to the dtype of ``x``.

    A gradient in float32 would double what devices exchange of the output layer's gradient.

    Args:
        x: The hidden states ``[..., embed]``.
        head: The output layer, with the axes ``embed`` and ``vocab`` in any order.
    """
    return hax.dot(x, head, axis="embed", preferred_element_type=jnp.float32)


def _forward(x: NamedArray, head: NamedArray) -> tuple[NamedArray, tuple[NamedArray, NamedArray]]:
    return float32_logits(x, head), (x, head)


def _backward(factors: tuple[NamedArray, NamedArray], gradient: NamedArray) -> tuple[NamedArray, NamedArray]:
    x, head = factors
    gradient = gradient.astype(jnp.result_type(x.array, head.array))
    of_x = hax.dot(gradient, head, axis="vocab").astype(x.dtype)
    # The hidden states first: the rule of JAX's own product has the gradient first, and XLA for CPUs turned it over in
    # memory, and then the result.
    of_head = hax.dot(x, gradient, axis=[axis for axis in x.axes if axis.name != "embed"]).astype(head.dtype)
    return of_x.rearrange(x.axes), of_head.rearrange(head.axes)


float32_logits.defvjp(_forward, _backward)
