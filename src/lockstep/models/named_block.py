"""The block of the trainable model on named axes: their names, norms, rotary embeddings, output layer."""

import dataclasses
from typing import Self

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lockstep.models import block
from lockstep.models.attention import SplitPositions
from lockstep.models.config import LlamaConfig, distinct, layer_kinds, rotary_frequencies
from lockstep.models.delta_rule import LinearAttention
from lockstep.models.latent import Latent
from lockstep.placement import PARAMETER_AXES, PP, compute_axes
from lockstep.placement.device import auto_axes


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
    Rank: Axis
    One: Axis
    GatedHead: Axis
    KeyHead: Axis
    Key: Axis
    ValueGroup: Axis
    Value: Axis
    Qkvz: Axis
    Gates: Axis
    Width: Axis
    QRank: Axis
    QLatent: Axis
    KvLatent: Axis
    Latent: Axis
    KeyValue: Axis
    ValueSize: Axis

    @classmethod
    def of(cls, config: LlamaConfig) -> Self:
        """Return the axes of a configuration, with the names that sharding rules use."""
        linear = config.linear_attention or LinearAttention()
        latent = config.latent or Latent()
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
            Rank=Axis("rank", config.variant.gated_norm_rank or 1),
            One=Axis("one", 1),
            GatedHead=Axis("gated_head", 2 * config.head_size),
            KeyHead=Axis("key_head", linear.key_heads),
            Key=Axis("key", linear.key_head_dim),
            ValueGroup=Axis("value_group", linear.group),
            Value=Axis("value", linear.value_head_dim),
            Qkvz=Axis("qkvz", linear.qkvz),
            Gates=Axis("gates", 2 * linear.group),
            Width=Axis("width", linear.conv_width),
            QRank=Axis("q_rank", latent.q_lora_rank or 1),
            QLatent=Axis("q_latent", latent.q_lora_rank or 1),
            KvLatent=Axis("kv_latent", latent.kv_lora_rank),
            Latent=Axis("latent", latent.size),
            KeyValue=Axis("key_value", latent.qk_nope_head_dim + latent.v_head_dim),
            ValueSize=Axis("head_size", config.value_size),
        )


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


def neutral(config: LlamaConfig, *axes: Axis) -> NamedArray:
    """Return the weight of a norm that multiplies by 1."""
    return hax.zeros(axes) if config.variant.norm_plus_one else hax.ones(axes)


def norm_gates(config: LlamaConfig, key: jax.Array, norm: str, has: bool = True) -> dict[str, NamedArray | None]:
    """Return random matrices of the gate of a norm, by their names."""
    ax, rank = LlamaAxes.of(config), config.variant.gated_norm_rank
    sides = {f"{norm}_down": (ax.Embed, ax.Rank), f"{norm}_up": (ax.Rank, ax.Embed)}
    keys = dict(zip(sides, jax.random.split(jax.random.fold_in(key, 2)), strict=True))
    std = config.initializer_range
    return {name: hax.random.normal(keys[name], axes) * std if has and rank else None for name, axes in sides.items()}


def rotary_angles(config: LlamaConfig, positions: NamedArray) -> NamedArray:
    """Return the rotary angles of some positions.

    Returns:
        The angles in float32 radians ``[half_head]``, with the axes of ``positions`` in front; where layers differ,
        with ``layer_kind`` before all: one entry for each of their distinct kinds.
    """
    kinds, _ = distinct(layer_kinds(config))
    angles = block.rope_angles(positions.array, [rotary_frequencies(config, kind.rope) for kind in kinds])
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
