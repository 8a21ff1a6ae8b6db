"""The weights that the decoder reads: one pytree of plain arrays, layers stacked, whatever library trains the model.

The annotation of each field names the axes of that weight. Nothing else does: which axis the devices of a replica
split, which axis is that of the kv heads, and the order in which readers must bring the axes follow from `WEIGHT_AXES`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import jax
from jaxtyping import Array, Float

from lockstep.placement.device import platform_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of all transformer layers, stacked on a leading layer axis.

    Axes: ``layer``; ``embed`` (hidden size); ``kv_head``; ``group`` (query heads per kv head); ``head`` (head size);
    ``gated_head`` (twice that: a query and its gate); ``key_head``, ``key``, ``value_group`` and ``value`` (heads and
    sizes of linear attention, `lockstep.models.LinearAttention`); ``qkvz`` and ``gates`` (all that a key head has);
    ``width`` (positions of its convolution); ``mlp`` (intermediate size); ``expert``; ``expert_mlp`` (intermediate size
    of an expert); ``gate_up`` (twice that: gate and up in turns); ``shared_mlp`` (that of the shared expert); ``rank``
    (of the gates of norms); ``one`` (a single number); of a `lockstep.models.Latent` ``q_rank`` and ``q_latent`` (that
    of queries), ``kv_latent`` (that of keys and values), ``latent`` (with the rotated key), ``key_value`` (a head's
    parts of both). Query head ``i`` of a Hugging Face checkpoint is ``(kv_head, group) = divmod(i, G)``, ``G`` being
    the number of query heads per kv head. The axes of heads may also be flattened into fewer, in this order. A weight
    with another order of axes, or with one array per layer, is a `lockstep.placement.LazyWeight`.

    Example:
        >>> _, weights = lockstep.models.read_decoder(model)
        >>> weights.layers.gate.shape
        (2, 32, 64)
    """

    q: Float[Array, "layer embed kv_head group head"] | None = None
    gated_q: Float[Array, "layer embed kv_head group gated_head"] | None = None
    k: Float[Array, "layer embed kv_head head"] | None = None
    v: Float[Array, "layer embed kv_head head"] | None = None
    q_a: Float[Array, "layer embed q_rank"] | None = None
    q_a_norm: Float[Array, "layer q_latent"] | None = None
    q_b: Float[Array, "layer q_latent kv_head group head"] | None = None
    kv_a: Float[Array, "layer embed latent"] | None = None
    kv_a_norm: Float[Array, "layer kv_latent"] | None = None
    kv_b: Float[Array, "layer kv_latent kv_head key_value"] | None = None
    o: Float[Array, "layer kv_head group head embed"]
    wide_q: Float[Array, "layer embed kv_head group head"] | None = None
    wide_k: Float[Array, "layer embed kv_head head"] | None = None
    wide_v: Float[Array, "layer embed kv_head head"] | None = None
    wide_o: Float[Array, "layer kv_head group head embed"] | None = None
    wide_q_norm: Float[Array, "layer head"] | None = None
    wide_k_norm: Float[Array, "layer head"] | None = None
    linear_qkvz: Float[Array, "layer embed key_head qkvz"] | None = None
    linear_gates: Float[Array, "layer embed key_head gates"] | None = None
    linear_q: Float[Array, "layer embed key_head key"] | None = None
    linear_k: Float[Array, "layer embed key_head key"] | None = None
    linear_v: Float[Array, "layer embed key_head value_group value"] | None = None
    linear_z: Float[Array, "layer embed key_head value_group value"] | None = None
    linear_b: Float[Array, "layer embed key_head value_group"] | None = None
    linear_a: Float[Array, "layer embed key_head value_group"] | None = None
    linear_conv_q: Float[Array, "layer key_head key one width"] | None = None
    linear_conv_k: Float[Array, "layer key_head key one width"] | None = None
    linear_conv_v: Float[Array, "layer key_head value_group value one width"] | None = None
    linear_decay: Float[Array, "layer key_head value_group"] | None = None
    linear_decay_bias: Float[Array, "layer key_head value_group"] | None = None
    linear_norm: Float[Array, "layer value"] | None = None
    linear_o: Float[Array, "layer key_head value_group value embed"] | None = None
    up: Float[Array, "layer embed mlp"] | None = None
    down: Float[Array, "layer mlp embed"] | None = None
    gate: Float[Array, "layer embed mlp"] | None = None
    router: Float[Array, "layer embed expert"] | None = None
    expert_gate: Float[Array, "layer expert embed expert_mlp"] | None = None
    expert_up: Float[Array, "layer expert embed expert_mlp"] | None = None
    expert_gate_up: Float[Array, "layer expert embed gate_up"] | None = None
    expert_down: Float[Array, "layer expert expert_mlp embed"] | None = None
    shared_gate: Float[Array, "layer embed shared_mlp"] | None = None
    shared_up: Float[Array, "layer embed shared_mlp"] | None = None
    shared_down: Float[Array, "layer shared_mlp embed"] | None = None
    shared_router: Float[Array, "layer embed one"] | None = None
    shared_post_norm: Float[Array, "layer embed"] | None = None
    routed_norm: Float[Array, "layer embed"] | None = None
    routed_post_norm: Float[Array, "layer embed"] | None = None
    router_scale: Float[Array, "layer embed"] | None = None
    router_factors: Float[Array, "layer expert"] | None = None
    attn_norm: Float[Array, "layer embed"] | None = None
    attn_norm_down: Float[Array, "layer embed rank"] | None = None
    attn_norm_up: Float[Array, "layer rank embed"] | None = None
    mlp_norm: Float[Array, "layer embed"] | None = None
    mlp_norm_down: Float[Array, "layer embed rank"] | None = None
    mlp_norm_up: Float[Array, "layer rank embed"] | None = None
    attn_post_norm: Float[Array, "layer embed"] | None = None
    mlp_post_norm: Float[Array, "layer embed"] | None = None
    layer_scalar: Float[Array, "layer one"] | None = None
    q_bias: Float[Array, "layer kv_head group head"] | None = None
    k_bias: Float[Array, "layer kv_head head"] | None = None
    v_bias: Float[Array, "layer kv_head head"] | None = None
    router_bias: Float[Array, "layer expert"] | None = None
    expert_gate_up_bias: Float[Array, "layer expert gate_up"] | None = None
    expert_down_bias: Float[Array, "layer expert embed"] | None = None
    o_bias: Float[Array, "layer embed"] | None = None
    sinks: Float[Array, "layer kv_head group"] | None = None
    head_gate: Float[Array, "layer embed kv_head group"] | None = None
    q_norm: Float[Array, "layer head"] | None = None
    k_norm: Float[Array, "layer head"] | None = None
    q_wide_norm: Float[Array, "layer kv_head group head"] | None = None
    k_wide_norm: Float[Array, "layer kv_head head"] | None = None
    xielu_p: Float[Array, " layer"] | None = None
    xielu_n: Float[Array, " layer"] | None = None
    xielu_beta: Float[Array, " layer"] | None = None
    xielu_eps: Float[Array, " layer"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """Weights of a language model. ``lm_head`` is None when the embedding is tied to it.

    What is None is not computed; which weights there are must agree with `LlamaConfig`.

    Example:
        >>> _, weights = lockstep.models.read_decoder(model)
        >>> weights.embed.shape == (len(tokenizer), small.hidden_dim)
        True
    """

    embed: Float[Array, "vocab embed"]
    layers: LayerWeights
    final_norm: Float[Array, " embed"]
    lm_head: Float[Array, "embed vocab"] | None = None
    embed_norm: Float[Array, " embed"] | None = None
    embed_norm_down: Float[Array, "embed rank"] | None = None
    embed_norm_up: Float[Array, "rank embed"] | None = None
    final_norm_down: Float[Array, "embed rank"] | None = None
    final_norm_up: Float[Array, "rank embed"] | None = None


def _axes_of(*classes: type) -> dict[str, tuple[str, ...]]:
    """The axes of each weight of dataclasses of weights, read off their annotations."""

    def axes(annotation: Any) -> tuple[str, ...]:
        (array,) = [kind for kind in getattr(annotation, "__args__", (annotation,)) if hasattr(kind, "dim_str")]
        return tuple(array.dim_str.split())

    fields = [field for cls in classes for field in dataclasses.fields(cls) if field.type is not LayerWeights]
    return {field.name: axes(field.type) for field in fields}


WEIGHT_AXES: Final[Mapping[str, tuple[str, ...]]] = _axes_of(DecoderWeights, LayerWeights)
"""The names of the axes of each weight, by the name of the weight."""

STACKED: Final = frozenset(name for name, axes in WEIGHT_AXES.items() if axes[0] == "layer")
"""Names of the weights whose first axis is the layer."""

TENSOR_DIMS: Final[Mapping[str, int]] = {
    name: axes.index(split)
    for name, axes in WEIGHT_AXES.items()
    for split in ("vocab", "kv_head", "key_head", "mlp", "expert_mlp", "gate_up", "shared_mlp")
    if split in axes
}
"""The axis of each weight that the devices of a replica split: vocabulary, kv heads, key heads of linear attention,
or the width of MLPs. A weight that has none is copied to each. The number is right for weights with flattened head axes
too, for ``kv_head`` comes first."""


LINEAR_WEIGHTS: Final = frozenset(name for name in WEIGHT_AXES if name.startswith("linear_"))
"""Names of the weights of a layer with linear attention."""

JOINED_DELTA: Final = ("linear_qkvz", "linear_gates")
"""Names of those that have all parts of a key head."""

SPLIT_DELTA: Final = tuple(f"linear_{part}" for part in "qkvzba")
"""Names of those that a model has in place of these (`Variant.split_delta`)."""

WIDE: Final = {name.removeprefix("wide_"): name for name in WEIGHT_AXES if name.startswith("wide_")}
"""Names of the weights of a layer whose heads have another size than those of most, by the names of theirs."""

ATTENTION_WEIGHTS: Final = frozenset(
    name
    for name, axes in WEIGHT_AXES.items()
    if ({"kv_head", "head"} & {*axes} or name == "o_bias") and name not in WIDE.values()
)
"""Names of the weights of a layer with attention over all positions, in place of these."""

_BY_ATTENTION: Final = {"linear": LINEAR_WEIGHTS, "wide": frozenset(WIDE.values()), "full": ATTENTION_WEIGHTS}


def as_full(w: Any) -> Any:
    """The weights of a layer with those of wide heads under the names that others have."""
    if getattr(w, "wide_q", None) is None:
        return w
    own = {name: getattr(w, wide) for name, wide in WIDE.items()}
    return dataclasses.replace(w, **own, **dict.fromkeys(WIDE.values()))


def attention_of(weight: str) -> str | None:
    """The kind of attention (`lockstep.models.layer_kinds.KindsOfLayers.attention_kinds`) that has a weight; None for
    one that layers of any kind have.
    """
    return next((kind for kind, names in _BY_ATTENTION.items() if weight in names), None)


MLP_WEIGHTS: Final = ("gate", "up", "down")
"""Names of the weights of a layer that has an MLP, beside those that all layers have."""

SPARSE_WEIGHTS: Final = frozenset(
    name for name in WEIGHT_AXES if name.startswith(("router", "routed_", "expert_", "shared_"))
)
"""Names of the weights of a layer that has experts instead."""


def tensor_dims(*, whole_experts: bool) -> Mapping[str, int]:
    """`TENSOR_DIMS`, or where the devices of a replica have whole experts, in place of a part of the width of each."""
    if not whole_experts:
        return TENSOR_DIMS
    whole = {name: axes.index("expert") for name, axes in WEIGHT_AXES.items() if "expert" in axes[:-1]}
    return {**TENSOR_DIMS, **whole}


def part_lanes(platform: str) -> Mapping[str, int]:
    """The number of which a part of an expert's width becomes a multiple, by the name of the weight."""
    widths = (name for name, axes in WEIGHT_AXES.items() if axes[-1] in ("expert_mlp", "gate_up"))
    lanes = platform_of(platform).lanes
    return {} if lanes is None else dict.fromkeys(widths, lanes)


def quantized_dims(name: str, ndim: int) -> tuple[int, ...]:
    """`input_dims` of a weight whose products may be in 8 bits; none for a router, whose choice hangs on rounding, for
    gates of a memory, whose errors last, and for ``kv_b``, which decoding multiplies by one side and by the other.
    """
    wide = ("router", "shared_router", "linear_gates", "linear_a", "linear_b", "kv_b")
    return () if name in wide else input_dims(name, ndim)


_INPUTS: Final = frozenset(("embed", "q_latent", "kv_latent"))


def input_dims(name: str, ndim: int) -> tuple[int, ...]:
    """The axes of a layer's weight that its matrix product sums over, counted from the last.

    Args:
        ndim: The number of its axes, the layer's among them; those of heads may be flattened.

    Returns:
        Consecutive axes; none for norms and biases, and for embedding and output layer.
    """
    stacked, *axes = WEIGHT_AXES[name]
    if stacked != "layer" or not _INPUTS & {*axes} or len(axes) < 2:
        return ()
    first = 1 - ndim + (axes[0] == "expert")
    return (first,) if axes[-1] != "embed" else tuple(range(first, -1))


HALIAX_AXES: Final[Mapping[str, str]] = {"group": "q_heads_per_group", "head": "head_size"}
"""The names of axes in our trainable model and in Levanter's, by the decoder's shorter ones."""


def haliax_axes(name: str) -> tuple[str, ...]:
    """The axes of a weight by their names in haliax models."""
    return tuple(HALIAX_AXES.get(axis, axis) for axis in WEIGHT_AXES[name])


VOCAB_MULTIPLE = 128
"""The rows of an embedding made from scratch are a multiple of this, on any mesh: the lanes of a TPU's tile."""


def padded_vocab_size(token_ids: int, tp: int) -> int:
    """Return the number of rows of an embedding made from scratch.

    It does not depend on the mesh where ``tp`` is a power of two up to 128, so that a run goes on with any of them and
    has the same losses. Levanter rounds to what the mesh needs (``round_axis_for_partitioning``).

    Args:
        tp: The size of the mesh axis that splits the vocabulary.
    """
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-token_ids // multiple) * multiple
