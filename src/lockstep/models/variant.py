"""The departures of a model from Llama."""

import dataclasses
from typing import Literal

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError
from lockstep.models.block import UNGATED
from lockstep.models.rope import RotaryConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "clamped_swiglu"]
LayerType = Literal["sliding_attention", "full_attention", "linear_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Departures from Llama; each at its default costs nothing.

    Raises:
        ConfigError: A value cannot work.

    Example:
        >>> gemma = lockstep.models.Variant(activation="gelu_tanh", norm_plus_one=True, logit_soft_cap=30.0)
        >>> LlamaConfig(variant=gemma).variant.gated
        True
    """

    activation: Activation = "silu"
    """The activation of the gated MLP; ``gelu_tanh`` is the approximate GELU of Gemma. ``xielu``
    (https://arxiv.org/abs/2411.13010, Apertus) has parameters in each layer, and no gate; ``relu2``, the square of ReLU
    (https://arxiv.org/abs/2109.08668, Arcee), has no gate either. ``clamped_swiglu`` is that of
    gpt-oss's experts, whose gate and up are one weight; router and experts then have biases."""
    pre_norm: bool = True
    """Whether an RMSNorm comes before attention and before the MLP. OLMo 2 has none."""
    post_norm: bool = False
    """Whether an RMSNorm comes after attention and the MLP, before the residual addition: OLMo 2, Gemma 2 and 3."""
    parallel: bool = False
    """Whether the MLP reads the norm before attention, too, and has none before it (Cohere 2)."""
    centered_norm: bool = False
    """Whether norms subtract the mean first: LayerNorm without a bias (Cohere 2)."""
    norm_plus_one: bool = False
    """Whether RMSNorm multiplies by 1 + weight, in float32 (Gemma)."""
    wide_qk_norm: bool = False
    """Whether ``qk_norm`` is over all heads together (OLMo 2), not over each head."""
    norm_after_rope: bool = False
    """Whether the norm of ``qk_norm`` over each head comes after the rotary embeddings (Hunyuan), not before them."""
    embed_norm: bool = False
    """Whether an RMSNorm comes after the embedding."""
    embed_scale: float | Literal["sqrt_hidden_dim"] | None = None
    """The factor of the embedding; in Gemma the square root of ``hidden_dim``. Null for 1."""
    residual_scale: float | None = None
    """The factor of what attention and MLP add to the residual stream (Granite). Null for 1."""
    attention_scale: float | None = None
    """The factor of attention scores. Null for ``head_dim ** -0.5``."""
    attention_sinks: bool = False
    """Whether each query head has a learned score for nothing, which takes a part of its softmax (gpt-oss)."""
    gated_norm_rank: int | None = None
    """The rank of gates of norms: before attention and MLP, after the embedding, the last (Snowball). Null for none."""
    unit_qk_norm: float | None = None
    """The epsilon of an RMSNorm of each query and key that has no weight (Snowball). Null for none."""
    exclusive_attention: bool = False
    """Whether attention's output loses its part along the value of the query's own position (Snowball)."""
    head_gates: bool = False
    """Whether attention's output is multiplied by a gate of each query head (Snowball)."""
    o_bias: bool = False
    """Whether the output projection of attention has a bias (gpt-oss)."""
    gated_attention: bool = False
    """Whether attention's output is multiplied by the sigmoid of a gate of each element (Qwen3-Next, Qwen3.5)."""
    split_delta: bool = False
    """Whether the parts of linear attention's projection are weights of their own (Qwen3.5), not one (Qwen3-Next)."""
    attention_soft_cap: float | None = None
    """The soft cap of attention scores: a score s becomes ``cap * tanh(s / cap)`` (Gemma 2). Null for none."""
    logit_soft_cap: float | None = None
    """The soft cap of the logits of the output layer. Null for none."""
    logit_scale: float | None = None
    """The factor of the logits, before the soft cap (Cohere 2). Null for 1."""
    sliding_window: int | None = None
    """The number of positions that a query attends to, its own included. Null for all."""
    layer_types: tuple[LayerType, ...] | None = None
    """The attention of each layer, in Hugging Face's words: ``sliding_attention`` has the ``sliding_window``,
    ``full_attention`` has none, ``linear_attention`` has a state (`LinearAttention`). Null: as ``full_attention_every``
    says; else with ``sliding_window`` all have it."""
    full_attention_every: int | None = None
    """Every how many layers one has no ``sliding_window``: 2 in Gemma 2, 6 in Gemma 3. Null: ``layer_types`` says."""
    interleaved_rope: bool = False
    """Whether neighbouring elements of a head are rotated together (GLM, Cohere), not those half of it apart."""
    full_rope: bool = True
    """Whether layers with full attention have rotary embeddings; Cohere 2 has them in the others alone."""
    no_rope_every: int | None = None
    """Every how many layers one has no rotary embeddings, whatever its window (SmolLM3). Null for none."""
    sliding_rope: RotaryConfig | None = None
    """The rotary embeddings of layers with sliding attention; others have ``rope`` (Gemma 3). Null: all have it."""

    def __post_init__(self) -> None:
        check_fields(self, "variant.")
        scales = ("embed_scale", "residual_scale", "attention_scale", "logit_scale")
        caps = ("attention_soft_cap", "logit_soft_cap")
        for name in (*scales, *caps, "sliding_window", "no_rope_every", "gated_norm_rank", "unit_qk_norm"):
            value = getattr(self, name)
            if value not in (None, "sqrt_hidden_dim") and not value > 0:
                raise ConfigError(f"variant.{name} is {value}; it must be more than 0. Use null for none.")
        if not (self.pre_norm or self.post_norm):
            raise ConfigError(
                "variant.pre_norm and variant.post_norm are both false; attention and MLP need a norm before or after "
                "them. Set one of them to true."
            )
        if self.wide_qk_norm and self.norm_after_rope:
            raise ConfigError(
                "variant.wide_qk_norm and variant.norm_after_rope are both true; only norms over each head come after "
                "the rotary embeddings. Set one of them to false."
            )
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        types = self.layer_types
        every = self.full_attention_every
        if every is not None and (types is not None or every < 2):
            raise ConfigError(
                f"variant.full_attention_every is {every} and variant.layer_types is {types}; it must be at least 2, "
                "and one of the two null. Set one of them."
            )
        slides = every is not None or (types is not None and "sliding_attention" in types)
        if slides and self.sliding_window is None:
            raise ConfigError(
                "variant.layer_types has sliding_attention and variant.sliding_window is null. Set sliding_window to "
                "the number of positions that those layers attend to."
            )
        for field in ("sliding_window", "sliding_rope"):
            if getattr(self, field) is not None and not slides and (types is not None or field == "sliding_rope"):
                raise ConfigError(
                    f"variant.{field} is set and variant.layer_types has no sliding_attention, so that it has no "
                    f"effect. Set {field} to null, or name the layers that have it."
                )

    @property
    def norms(self) -> frozenset[str]:
        """The names of the weights of a layer's norms of the residual stream."""
        before = {"attn_norm", *(() if self.parallel else ("mlp_norm",))} if self.pre_norm else set()
        after = {"attn_post_norm", "mlp_post_norm"} if self.post_norm else set()
        return frozenset(before | after)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation not in ("xielu", *UNGATED)

    @property
    def fused_gate(self) -> bool:
        """Whether gate and up of experts are one weight, in turns, and experts and router have biases."""
        return self.activation == "clamped_swiglu"
