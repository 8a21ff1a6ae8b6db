"""Rotary position embeddings of the trainable model, with named axes."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Int

from lockstep.models import block
from lockstep.models.config import LlamaConfig, distinct, layer_kinds, rotary_frequencies


def rotary_angles(config: LlamaConfig, Position: Axis, segment_ids: NamedArray | None) -> NamedArray:
    """Returns the rotary angles of a batch.

    Args:
        config: The configuration of the model.
        Position: The axis of positions.
        segment_ids: The document of each token, with whose beginning positions restart; None: a row is one document.

    Returns:
        The angles in float32 radians ``[position, half_head]``, with the other axes of ``segment_ids`` in front; where
        layers differ, with ``layer_kind`` before all: one entry for each of their distinct kinds.
    """
    positions = hax.arange(Position) if segment_ids is None else _positions(segment_ids, Position)
    kinds, _ = distinct(layer_kinds(config))
    angles = block.rope_angles(positions.array, [rotary_frequencies(config, kind.rope) for kind in kinds])
    return hax.named(angles, (*(["layer_kind"] if len(kinds) > 1 else []), *positions.axes, "half_head"))


def rotate(x: NamedArray, angles: NamedArray, HeadSize: Axis) -> NamedArray:
    """Applies rotary embeddings to named axes.

    Args:
        x: The heads ``[..., position, ..., head_size]``.
        angles: The angles in float32 radians ``[..., position, half_head]``.
        HeadSize: The axis whose two halves are rotated together.

    Returns:
        The rotated heads, with the axes and dtype of ``x``.
    """
    axes = (*(axis for axis in x.axes if axis != HeadSize), HeadSize)
    given = [axis for axis in axes if axis in angles.axes]
    spread = angles.rearrange((*given, "half_head")).array
    spread = spread.reshape([axis.size if axis in given else 1 for axis in axes[:-1]] + [-1])
    return hax.named(block.rotate(x.rearrange(axes).array, jnp.cos(spread), jnp.sin(spread)), axes).rearrange(x.axes)


def _positions(segment_ids: NamedArray, Position: Axis) -> NamedArray:
    """Returns the position of each token in its document."""
    axes = (*(axis for axis in segment_ids.axes if axis != Position), Position)
    ids: Int[Array, "... position"] = segment_ids.rearrange(axes).array
    index = jnp.arange(Position.size)
    first = jnp.where((ids != jnp.roll(ids, 1, axis=-1)) | (index == 0), index, 0)
    return hax.named(index - jax.lax.cummax(first, axis=first.ndim - 1), axes)
