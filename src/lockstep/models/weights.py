"""What the decoder reads of a model: one pytree of plain arrays, layers stacked, whatever library trains the model."""

import dataclasses

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of all transformer layers, stacked on a leading layer axis.

    Axes: ``layer``; ``embed`` (hidden size); ``kv_head``; ``group`` (query heads per kv head); ``head`` (head size);
    ``mlp`` (intermediate size). Query head ``i`` of a Hugging Face checkpoint is ``(kv_head, group) = divmod(i, G)``,
    ``G`` being the number of query heads per kv head. The axes of heads may also be flattened into fewer, in this
    order. A weight with another order of axes, or with one array per layer, is a `lockstep.placement.LazyWeight`.
    """

    q: Float[Array, "layer embed kv_head group head"]
    k: Float[Array, "layer embed kv_head head"]
    v: Float[Array, "layer embed kv_head head"]
    o: Float[Array, "layer kv_head group head embed"]
    up: Float[Array, "layer embed mlp"]
    down: Float[Array, "layer mlp embed"]
    gate: Float[Array, "layer embed mlp"] | None = None
    attn_norm: Float[Array, "layer embed"] | None = None
    mlp_norm: Float[Array, "layer embed"] | None = None
    attn_post_norm: Float[Array, "layer embed"] | None = None
    mlp_post_norm: Float[Array, "layer embed"] | None = None
    q_bias: Float[Array, "layer kv_head group head"] | None = None
    k_bias: Float[Array, "layer kv_head head"] | None = None
    v_bias: Float[Array, "layer kv_head head"] | None = None
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
    """

    embed: Float[Array, "vocab embed"]
    layers: LayerWeights
    final_norm: Float[Array, " embed"]
    lm_head: Float[Array, "embed vocab"] | None = None
    embed_norm: Float[Array, " embed"] | None = None
