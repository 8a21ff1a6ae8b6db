"""Shapes and switches of a Llama-family language model, in Levanter's words, and their Hugging Face equivalents."""

import dataclasses
import math
from typing import Literal, get_args

import draccus
import numpy as np
from jaxtyping import Float

from lockstep.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "xielu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Departures from Llama; each at its default costs nothing.

    Raises:
        ConfigError: a value that cannot work.
    """

    activation: Activation = "silu"
    """Of the gated MLP: ``gelu_tanh`` is the approximate GELU of Gemma. ``xielu`` (https://arxiv.org/abs/2411.13010,
    Apertus) has parameters in each layer, and no gate."""
    pre_norm: bool = True
    """An RMSNorm before attention and MLP. OLMo 2 has none."""
    post_norm: bool = False
    """An RMSNorm after attention and MLP, before they are added to the stream: OLMo 2, Gemma 2 and 3."""
    norm_plus_one: bool = False
    """RMSNorm multiplies by 1 + weight, in float32 (Gemma)."""
    wide_qk_norm: bool = False
    """``qk_norm`` is over all heads together (OLMo 2), not over each head."""
    embed_norm: bool = False
    """An RMSNorm after the embedding."""
    embed_scale: float | None = None
    """The embedding is multiplied by this; Gemma: the square root of ``hidden_dim``. Null for 1."""
    attention_scale: float | None = None
    """Attention scores are multiplied by this; null: ``head_dim ** -0.5``."""
    attention_soft_cap: float | None = None
    """Attention scores s become ``cap * tanh(s / cap)`` (Gemma 2). Null for none."""
    logit_soft_cap: float | None = None
    """The same for the logits of the output layer."""
    sliding_window: int | None = None
    """Positions that a query sees, its own among them. Null for all."""

    def __post_init__(self) -> None:
        for name in ("embed_scale", "attention_scale", "attention_soft_cap", "logit_soft_cap", "sliding_window"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"variant.{name} is {value}; it must be more than 0. Use null for none.")
        if not (self.pre_norm or self.post_norm):
            raise ConfigError(
                "variant.pre_norm and variant.post_norm are both false; attention and MLP need a norm before or after "
                "them. Set one of them to true."
            )
        known = get_args(Activation)
        if self.activation not in known:
            raise ConfigError(f"variant.activation is {self.activation!r}; it must be one of {', '.join(known)}.")

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation != "xielu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rotary frequency scaling of Llama 3.1 ("llama3" in Hugging Face): long waves are slowed down, short ones kept.

    Source: ``transformers/modeling_rope_utils.py``, ``_compute_llama3_parameters``.
    """

    factor: float = 8.0
    """Long waves are slowed down by this factor; at least 1."""
    low_freq_factor: float = 1.0
    """Waves longer than ``original_max_position_embeddings / low_freq_factor`` tokens are scaled in full."""
    high_freq_factor: float = 4.0
    """Waves shorter than ``original_max_position_embeddings / high_freq_factor`` tokens are left as they are."""
    original_max_position_embeddings: int = 8192
    """Context length, in tokens, of the model before it was extended."""

    def __post_init__(self) -> None:
        _at_least("rope.scaling.factor", self.factor, 1, "Llama 3.1 uses 8, Llama 3.2 uses 32.")
        _at_least(
            "rope.scaling.original_max_position_embeddings",
            self.original_max_position_embeddings,
            1,
            "Llama 3 uses 8192.",
        )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope.scaling.low_freq_factor is {self.low_freq_factor} and rope.scaling.high_freq_factor is "
                f"{self.high_freq_factor}; it must hold that 0 < low_freq_factor < high_freq_factor. Llama 3 uses 1 "
                "and 4."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embeddings (https://arxiv.org/abs/2104.09864), half-split as in Hugging Face."""

    theta: float = 10000.0
    """Base of the wave lengths."""
    scaling: Llama3Scaling | None = None
    """Frequency scaling, null for none."""

    def __post_init__(self) -> None:
        if not (self.theta > 1 and math.isfinite(self.theta)):
            raise ConfigError(
                f"rope.theta is {self.theta}; it must be finite and greater than 1. Llama 2 uses 10000, Llama 3 500000."
            )


class ModelConfig(draccus.ChoiceRegistry):
    """What ``model:`` in a YAML file can be; ``type`` chooses: llama, mistral, qwen2 or qwen3."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        return "llama"


@ModelConfig.register_subclass("llama")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A decoder-only transformer of the Llama family. Hashable, so that it can be static in a jitted function.

    Raises:
        ConfigError: a value that cannot work: says what was given, the limit and the fix.
    """

    max_seq_len: int = 2048
    """Longest sequence, in tokens."""
    hidden_dim: int = 4096
    """Width of the residual stream (``hidden_size`` in Hugging Face)."""
    intermediate_dim: int = 11008
    """Width of the gated MLP (``intermediate_size``)."""
    num_layers: int = 32
    """Transformer layers."""
    num_heads: int = 32
    """Query heads."""
    num_kv_heads: int = 32
    """Key/value heads; divides ``num_heads``."""
    head_dim: int | None = None
    """Size of a head; null is ``hidden_dim // num_heads``."""
    layer_norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_word_embeddings: bool = False
    """The output layer is the embedding, transposed."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    rope: RotaryConfig = dataclasses.field(default_factory=RotaryConfig)
    """Rotary position embeddings."""
    qkv_bias: bool = False
    """Query, key and value projections have a bias (Qwen2)."""
    qk_norm: bool = False
    """Queries and keys go through an RMSNorm over the head before the rotation (Qwen3)."""
    variant: Variant = dataclasses.field(default_factory=Variant)
    """How the model departs from Llama."""
    gradient_checkpointing: bool = True
    """Keep only each layer's input for the backward pass and compute the rest again (rematerialisation)."""

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads"):
            _at_least(name, getattr(self, name), 1, f"Set {name} to a positive whole number.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}; each key/value head serves "
                "the same number of query heads, so num_kv_heads must divide num_heads. Set num_kv_heads to one of "
                f"{_divisors(self.num_heads)}."
            )
        if self.head_dim is None and self.hidden_dim % self.num_heads:
            raise ConfigError(
                f"hidden_dim is {self.hidden_dim} and num_heads is {self.num_heads}; with head_dim null, num_heads "
                "must divide hidden_dim. Set head_dim, or change num_heads or hidden_dim."
            )
        if self.head_size < 2 or self.head_size % 2:
            origin = "hidden_dim // num_heads" if self.head_dim is None else "head_dim"
            raise ConfigError(
                f"the head size is {self.head_size} ({origin}); rotary embeddings turn pairs, so it must be "
                "even and at least 2. Set head_dim to an even number."
            )
        if not (self.layer_norm_epsilon > 0 and self.initializer_range >= 0):
            raise ConfigError(
                f"layer_norm_epsilon is {self.layer_norm_epsilon} and initializer_range is {self.initializer_range}; "
                "layer_norm_epsilon must be positive and initializer_range at least 0. Llama uses 1e-5 and 0.02."
            )
        if self.qkv_bias and self.qk_norm:
            raise ConfigError(
                "qkv_bias and qk_norm are both true; no architecture that Hugging Face can load has both, so the model "
                "could not be saved. Set one of them to false (qwen2 has qkv_bias, qwen3 has qk_norm)."
            )
        if self.variant.wide_qk_norm and not self.qk_norm:
            raise ConfigError(
                "variant.wide_qk_norm is true and qk_norm is false: there is no norm. Set qk_norm to true."
            )

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def q_heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@ModelConfig.register_subclass("mistral")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Mistral: a Llama whose sliding window, where its checkpoint has one, is not shorter than ``max_seq_len``."""


@ModelConfig.register_subclass("qwen2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Qwen2 and Qwen2.5: a Llama with biases on query, key and value."""

    qkv_bias: bool = True
    layer_norm_epsilon: float = 1e-6


@ModelConfig.register_subclass("qwen3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Qwen3: a Llama with an RMSNorm on each query and key head."""

    qk_norm: bool = True
    layer_norm_epsilon: float = 1e-6


def rotary_frequencies(config: LlamaConfig) -> Float[np.ndarray, " half_head"]:
    """Angle, in radians per token, by which each pair of a head is turned.

    Pair ``i`` is elements ``i`` and ``i + head_size // 2`` (Hugging Face's ``rotate_half``). Computed in float32 in the
    order of Hugging Face's code, so that long contexts do not drift from the reference.

    Args:
        config: of the model.

    Returns:
        float32 ``[head_size // 2]``.
    """
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    frequencies = np.float32(1.0) / np.float32(config.rope.theta) ** exponents
    scaling = config.rope.scaling
    if scaling is None:
        return frequencies
    context = scaling.original_max_position_embeddings
    wave_lengths = 2 * math.pi / frequencies
    smooth = (context / wave_lengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def _at_least(name: str, value: float, limit: float, fix: str) -> None:
    if not value >= limit:
        raise ConfigError(f"{name} is {value}; it must be at least {limit}. {fix}")


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]
