"""The configuration of a Llama-family language model, with Levanter's field names.

A model family is a subclass of `LlamaConfig` here, and its `Architecture` in `lockstep.models.hf.config`.
"""

import dataclasses
import math
from typing import Literal, get_args

import draccus
import numpy as np
from jaxtyping import Float

from lockstep.attention import AttentionBackend, check_backend
from lockstep.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "xielu"]
LayerType = Literal["sliding_attention", "full_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rotary frequency scaling of Llama 3.1 ("llama3" in Hugging Face): low frequencies are lowered, high ones kept.

    Source: ``transformers/modeling_rope_utils.py``, ``_compute_llama3_parameters``.

    Example:
        >>> lockstep.models.Llama3Scaling(factor=32.0).original_max_position_embeddings
        8192
    """

    factor: float = 8.0
    """The divisor of low frequencies; at least 1."""
    low_freq_factor: float = 1.0
    """Wavelengths above ``original_max_position_embeddings / low_freq_factor`` tokens are scaled in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below ``original_max_position_embeddings / high_freq_factor`` tokens are not scaled."""
    original_max_position_embeddings: int = 8192
    """The context length in tokens before it was extended."""

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
    """Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split as in Hugging Face.

    Example:
        >>> from lockstep.models import Llama3Scaling, RotaryConfig
        >>> LlamaConfig(rope=RotaryConfig(theta=500000.0, scaling=Llama3Scaling())).rope.theta
        500000.0
    """

    theta: float = 10000.0
    """The base of the wavelengths."""
    scaling: Llama3Scaling | None = None
    """The frequency scaling. Null for none."""
    linear_factor: float = 1.0
    """The divisor of positions, "linear" scaling in Hugging Face; at least 1. Gemma 3 has 8 in its larger models."""

    def __post_init__(self) -> None:
        _at_least("rope.linear_factor", self.linear_factor, 1, "Use 1 for none.")
        if self.scaling is not None and self.linear_factor != 1:
            raise ConfigError(
                f"rope.linear_factor is {self.linear_factor} and rope.scaling is set; no model has both. Set "
                "linear_factor to 1, or scaling to null."
            )
        if not (self.theta > 1 and math.isfinite(self.theta)):
            raise ConfigError(
                f"rope.theta is {self.theta}; it must be finite and greater than 1. Llama 2 uses 10000, Llama 3 500000."
            )


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
    (https://arxiv.org/abs/2411.13010, Apertus) has parameters in each layer, and no gate."""
    pre_norm: bool = True
    """Whether an RMSNorm comes before attention and before the MLP. OLMo 2 has none."""
    post_norm: bool = False
    """Whether an RMSNorm comes after attention and the MLP, before the residual addition: OLMo 2, Gemma 2 and 3."""
    norm_plus_one: bool = False
    """Whether RMSNorm multiplies by 1 + weight, in float32 (Gemma)."""
    wide_qk_norm: bool = False
    """Whether ``qk_norm`` is over all heads together (OLMo 2), not over each head."""
    embed_norm: bool = False
    """Whether an RMSNorm comes after the embedding."""
    embed_scale: float | None = None
    """The factor of the embedding; in Gemma the square root of ``hidden_dim``. Null for 1."""
    attention_scale: float | None = None
    """The factor of attention scores. Null for ``head_dim ** -0.5``."""
    attention_soft_cap: float | None = None
    """The soft cap of attention scores: a score s becomes ``cap * tanh(s / cap)`` (Gemma 2). Null for none."""
    logit_soft_cap: float | None = None
    """The soft cap of the logits of the output layer. Null for none."""
    sliding_window: int | None = None
    """The number of positions that a query attends to, its own included. Null for all."""
    layer_types: tuple[LayerType, ...] | None = None
    """The attention of each layer, in Hugging Face's words: ``sliding_attention`` has the ``sliding_window``,
    ``full_attention`` has none (Gemma 2 and 3). Null: with ``sliding_window`` all layers have it."""
    sliding_rope: RotaryConfig | None = None
    """The rotary embeddings of the layers with sliding attention; ``rope`` is then that of the others (Gemma 3). Null:
    all layers have ``rope``."""

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
        self._check_layer_types()
        known = get_args(Activation)
        if self.activation not in known:
            raise ConfigError(f"variant.activation is {self.activation!r}; it must be one of {', '.join(known)}.")

    def _check_layer_types(self) -> None:
        types = self.layer_types
        for name in () if types is None else types:
            if name not in get_args(LayerType):
                raise ConfigError(
                    f"variant.layer_types has {name!r}; each must be one of {', '.join(get_args(LayerType))}."
                )
        slides = types is not None and "sliding_attention" in types
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
    def norm_offset(self) -> float:
        """The number that RMSNorm adds to its weight."""
        return 1.0 if self.norm_plus_one else 0.0

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation != "xielu"


class ModelConfig(draccus.ChoiceRegistry):
    """The registry of model configurations: ``type`` of ``model`` in a YAML file is llama, mistral, qwen2 or qwen3."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        return "llama"


@ModelConfig.register_subclass("llama")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A decoder-only transformer of the Llama family. Hashable, so that it can be static in a jitted function.

    Raises:
        ConfigError: A value cannot work; the message says what was given, the limit and the fix.

    Example:
        >>> LlamaConfig(hidden_dim=2048, intermediate_dim=8192, num_layers=16, num_heads=32, num_kv_heads=8).head_size
        64
    """

    max_seq_len: int = 2048
    """The longest sequence in tokens."""
    hidden_dim: int = 4096
    """The width of the residual stream (``hidden_size`` in Hugging Face)."""
    intermediate_dim: int = 11008
    """The width of the MLP (``intermediate_size``)."""
    num_layers: int = 32
    """The number of transformer layers."""
    num_heads: int = 32
    """The number of query heads."""
    num_kv_heads: int = 32
    """The number of key/value heads; divides ``num_heads``."""
    head_dim: int | None = None
    """The size of a head. Null for ``hidden_dim // num_heads``."""
    layer_norm_epsilon: float = 1e-5
    """The number added to the mean square in RMSNorm."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding, transposed."""
    initializer_range: float = 0.02
    """The standard deviation of the initial weights."""
    rope: RotaryConfig = dataclasses.field(default_factory=RotaryConfig)
    """The rotary position embeddings."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether an RMSNorm over the head comes before the rotary embeddings of queries and keys (Qwen3)."""
    variant: Variant = dataclasses.field(default_factory=Variant)
    """The departures from Llama."""
    gradient_checkpointing: bool | Literal["nothing", "full", "dots", "offload"] = True
    """Rematerialisation: what the backward pass computes again. ``nothing`` (false); ``full`` (true): each layer, from
    its input; ``dots``: each layer but its products with weights; ``offload``: as ``full``, with the inputs of layers
    in the memory of the host. ``lockstep plan --remat all`` says what each costs."""
    attn_backend: AttentionBackend = "default"
    """How training computes attention, in Levanter's words: ``splash``, jax's kernel for TPU, which pads rows to a
    multiple of 128 tokens; ``jax_flash``, blocks of 512 queries on any device; ``vanilla``, all pairs of positions at
    once; ``default``: splash on TPU, jax_flash elsewhere. Samples are decoded by the engine, whatever it is."""

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
                f"the head size is {self.head_size} ({origin}); rotary embeddings rotate pairs, so it must be "
                "even and at least 2. Set head_dim to an even number."
            )
        if not (self.layer_norm_epsilon > 0 and self.initializer_range >= 0):
            raise ConfigError(
                f"layer_norm_epsilon is {self.layer_norm_epsilon} and initializer_range is {self.initializer_range}; "
                "layer_norm_epsilon must be positive and initializer_range at least 0. Llama uses 1e-5 and 0.02."
            )
        check_backend(self.attn_backend)
        if self.qkv_bias and self.qk_norm:
            raise ConfigError(
                "qkv_bias and qk_norm are both true; no architecture that Hugging Face can load has both, so the model "
                "could not be saved. Set one of them to false (qwen2 has qkv_bias, qwen3 has qk_norm)."
            )
        types = self.variant.layer_types
        if types is not None and len(types) != self.num_layers:
            raise ConfigError(
                f"variant.layer_types has {len(types)} entries and num_layers is {self.num_layers}; it needs one for "
                "each layer. Set it to null where all layers are of one kind."
            )
        if self.variant.wide_qk_norm and not self.qk_norm:
            raise ConfigError(
                "variant.wide_qk_norm is true and qk_norm is false: there is no norm. Set qk_norm to true."
            )

    @property
    def head_size(self) -> int:
        """The size of one attention head in elements."""
        return self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def q_heads_per_group(self) -> int:
        """The number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@ModelConfig.register_subclass("mistral")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Mistral (https://arxiv.org/abs/2310.06825): a Llama whose sliding window must not be below ``max_seq_len``.

    Example:
        >>> lockstep.models.MistralConfig(num_kv_heads=8, intermediate_dim=14336).q_heads_per_group
        4
    """


@ModelConfig.register_subclass("qwen2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Qwen2 (https://arxiv.org/abs/2407.10671) and Qwen2.5: a Llama with biases on query, key and value.

    Example:
        >>> lockstep.models.Qwen2Config().qkv_bias
        True
    """

    qkv_bias: bool = True
    layer_norm_epsilon: float = 1e-6


@ModelConfig.register_subclass("qwen3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Qwen3 (https://arxiv.org/abs/2505.09388): a Llama with an RMSNorm on each query and key head.

    Example:
        >>> lockstep.models.Qwen3Config(head_dim=128).qk_norm
        True
    """

    qk_norm: bool = True
    layer_norm_epsilon: float = 1e-6


def rotary_frequencies(config: LlamaConfig, rope: RotaryConfig | None = None) -> Float[np.ndarray, " half_head"]:
    """Returns the rotary frequency of each pair of elements of a head, in radians per token.

    Pair ``i`` is elements ``i`` and ``i + head_size // 2`` (Hugging Face's ``rotate_half``). RoFormer (Su et al. 2021,
    https://arxiv.org/abs/2104.09864, section 3.2.2), computed in float32 in the order of Hugging Face's code, so that
    long contexts do not drift from the reference.

    Args:
        config: The configuration of the model.
        rope: The rotary embeddings; None for ``config.rope``.

    Returns:
        The frequencies, float32 ``[head_size // 2]``.
    """
    rope = config.rope if rope is None else rope
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    frequencies = np.float32(1.0) / np.float32(rope.theta) ** exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies / np.float32(rope.linear_factor)
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def _at_least(name: str, value: float, limit: float, fix: str) -> None:
    if not value >= limit:
        raise ConfigError(f"{name} is {value}; it must be at least {limit}. {fix}")


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


VOCAB_MULTIPLE = 128
"""The rows of an embedding made from scratch are a multiple of this, on any mesh: the lanes of a TPU's tile."""


def padded_vocab_size(token_ids: int, tp: int) -> int:
    """Return the number of rows of an embedding made from scratch.

    It does not depend on the mesh where ``tp`` is a power of two up to 128, so that a run goes on with any of them and
    has the same losses. Levanter rounds to what the mesh needs (``round_axis_for_partitioning``).

    Args:
        token_ids: The number of token ids.
        tp: The size of the mesh axis that splits the vocabulary.
    """
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-token_ids // multiple) * multiple
