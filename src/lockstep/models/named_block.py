"""The block of the trainable model on named axes: their names, norms, rotary embeddings, output layer."""

import dataclasses
from typing import Self

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Int

from lockstep.models import block
from lockstep.models.config import LlamaConfig, distinct, layer_kinds, rotary_frequencies


@dataclasses.dataclass(frozen=True)
class LlamaAxes:
    """The named axes of a model's parameters."""

    Embed: Axis
    Mlp: Axis
    KVHead: Axis
    Group: Axis
    HeadSize: Axis
    Layer: Axis
    Expert: Axis
    ExpertMlp: Axis
    GateUp: Axis
    SharedMlp: Axis
    One: Axis

    @classmethod
    def of(cls, config: LlamaConfig) -> Self:
        """Returns the axes of a configuration, with the names that sharding rules use."""
        return cls(
            Embed=Axis("embed", config.hidden_dim),
            Mlp=Axis("mlp", config.intermediate_dim),
            KVHead=Axis("kv_head", config.num_kv_heads),
            Group=Axis("q_heads_per_group", config.q_heads_per_group),
            HeadSize=Axis("head_size", config.head_size),
            Layer=Axis("layer", config.num_layers),
            Expert=Axis("expert", 1 if config.experts is None else config.experts.num_experts),
            ExpertMlp=Axis("expert_mlp", config.expert_dim),
            GateUp=Axis("gate_up", 2 * config.expert_dim),
            SharedMlp=Axis("shared_mlp", (config.experts and config.experts.shared_intermediate_dim) or 1),
            One=Axis("one", 1),
        )


def rms_norm(x: NamedArray, weight: NamedArray | None, config: LlamaConfig) -> NamedArray:
    """Applies RMSNorm to named axes.

    Args:
        x: The input; it has the axes of ``weight`` and any others.
        weight: The weight, whose axes are normalised; None for no normalisation.

    Returns:
        The normalised input, with the axes and dtype of ``x``.
    """
    if weight is None:
        return x
    axes = (*(axis for axis in x.axes if axis not in weight.axes), *weight.axes)
    array = x.rearrange(axes).array
    normed = block.rms_norm(array, weight.array, config.layer_norm_epsilon, offset=config.variant.norm_offset)
    return hax.named(normed, axes).rearrange(x.axes)


def rotary_angles(config: LlamaConfig, positions: NamedArray) -> NamedArray:
    """Returns the rotary angles of some positions.

    Returns:
        The angles in float32 radians ``[half_head]``, with the axes of ``positions`` in front; where layers differ,
        with ``layer_kind`` before all: one entry for each of their distinct kinds.
    """
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


def document_positions(Position: Axis, segment_ids: NamedArray | None) -> NamedArray:
    """Returns the position of each token in its document; without ``segment_ids`` a row is one document."""
    if segment_ids is None:
        return hax.arange(Position)
    axes = (*(axis for axis in segment_ids.axes if axis != Position), Position)
    ids: Int[Array, "... position"] = segment_ids.rearrange(axes).array
    index = jnp.arange(Position.size)
    first = jnp.where((ids != jnp.roll(ids, 1, axis=-1)) | (index == 0), index, 0)
    return hax.named(index - jax.lax.cummax(first, axis=first.ndim - 1), axes)


@jax.custom_vjp
def float32_logits(x: NamedArray, head: NamedArray) -> NamedArray:
    """Returns logits in float32, whose gradient is rounded to the dtype of ``x``.

    A gradient in float32 would double what devices exchange of the output layer's gradient.

    Args:
        x: The hidden states ``[..., embed]``.
        head: The output layer, with the axes ``embed`` and ``vocab`` in any order.

    Returns:
        The logits ``[..., vocab]``.
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
