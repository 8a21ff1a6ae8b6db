"""The configuration of a language model, with Levanter's field names; `lockstep.models.families` has the families."""

import dataclasses
import math
from typing import ClassVar, Final, Literal

import draccus

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError
from lockstep.limits import LAYERS
from lockstep.models import block
from lockstep.models.attention import AttentionBackend
from lockstep.models.experts import Experts
from lockstep.models.layer_kinds import KindsOfLayers
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import Variant

Numerics = Literal["fast", "exact"]
SIZE_LIMIT = 1 << 31
"""The bound of every size of a model."""


_NOT_EXACT: Final = ("gated_norm_rank", "unit_qk_norm", "exclusive_attention", "head_gates", "gated_attention")
"""Fields of a variant that ``numerics: exact`` refuses: those of Snowball, which is sampled here, and trained elsewhere
by other functions, and a gate that is met with linear attention alone."""


class ModelConfig(draccus.ChoiceRegistry):
    """The registry of model configurations: ``type`` of ``model`` in a YAML file, one for each family."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        return "llama"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(KindsOfLayers, ModelConfig):
    """A decoder-only transformer of the Llama family. Hashable, so that it can be static in a jitted function.

    Raises:
        ConfigError: A value cannot work; the message says what was given, the limit and the fix.

    Example:
        >>> LlamaConfig(hidden_dim=2048, intermediate_dim=8192, num_layers=16, num_heads=32, num_kv_heads=8).head_size
        64
    """

    _biased_norms: ClassVar[bool] = False
    """Whether Hugging Face has an architecture of this class with both ``qkv_bias`` and ``qk_norm``."""

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
    experts: Experts | None = None
    """The experts of every layer, in place of an MLP. Null for none."""
    gradient_checkpointing: bool | Literal["nothing", "full", "dots", "offload"] = True
    """Rematerialisation: what the backward pass computes again. ``nothing`` (false); ``full`` (true): each layer, from
    its input; ``dots``: each layer but its products with weights; ``offload``: as ``full``, with the inputs of layers
    in the memory of the host. ``lockstep plan --remat all`` says what each costs."""
    attn_backend: AttentionBackend = "default"
    """The attention of training, in Levanter's words: ``splash``, jax's kernel for TPU, which pads rows to a
    multiple of 128 tokens; ``jax_flash``, blocks of 512 queries on any device; ``vanilla``, all pairs of positions at
    once; ``default``: splash on TPU, jax_flash elsewhere. Samples are decoded by the engine, whatever it is."""
    numerics: Numerics = "fast"
    """``exact``: the log-probability of a token has the same bits in decode, prefill, verify and the training forward,
    whatever the batch and the layout (docs/exact.md). ``fast``: they differ by rounding."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_sizes()
        self._check_numerics()
        self._check_parts()

    def _check_sizes(self) -> None:
        sizes = ["max_seq_len", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads"]
        for name in sizes if self.head_dim is None else [*sizes, "head_dim"]:
            value = getattr(self, name)
            if value >= SIZE_LIMIT:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number below {SIZE_LIMIT}. Correct it.")
            if name == "num_layers" and value > LAYERS:
                raise ConfigError(f"num_layers is {value}; a model has at most {LAYERS} layers. Correct it.")
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1. Set {name} to a positive whole number.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}; each key/value head serves "
                "the same number of query heads, so num_kv_heads must divide num_heads. Set num_kv_heads to one of "
                f"{[i for i in range(1, min(self.num_heads, 4096) + 1) if self.num_heads % i == 0]}."
            )
        if self.latent is None and self.head_dim is None and self.hidden_dim % self.num_heads:
            raise ConfigError(
                f"hidden_dim is {self.hidden_dim} and num_heads is {self.num_heads}; with head_dim null, num_heads "
                "must divide hidden_dim. Set head_dim, or change num_heads or hidden_dim."
            )
        if self.latent is None and (self.head_size < 2 or self.head_size % 2):
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

    def _check_parts(self) -> None:
        if self.qkv_bias and self.qk_norm and not self._biased_norms:
            raise ConfigError(
                "qkv_bias and qk_norm are both true; of the architectures that Hugging Face can load only glm4_moe "
                "has both, so the model could not be saved. Set one to false (qwen2 has qkv_bias, qwen3 has qk_norm)."
            )
        if self.experts is not None and not self.variant.gated:
            raise ConfigError(
                f"experts is set and variant.activation is {self.variant.activation!r}, whose MLP has no gate; the "
                "MLPs of experts have one. Use another activation, or set experts to null."
            )
        if self.experts is None and self.variant.fused_gate:
            raise ConfigError(
                f"variant.activation is {self.variant.activation!r}, which is one of experts, and experts is null. Set "
                "experts, or use another activation."
            )
        if self.experts is not None:
            self.experts.check_layers(self.num_layers)
        types = self.variant.layer_types
        if types is not None and len(types) != self.num_layers:
            raise ConfigError(
                f"variant.layer_types has {len(types)} entries and num_layers is {self.num_layers}; it needs one for "
                "each layer. Set it to null where all layers are of one kind."
            )
        if self.linear_layers and self.linear_attention is None:
            raise ConfigError(
                f"variant.layer_types has linear_attention in {len(self.linear_layers)} of {self.num_layers} layers, "
                "and linear_attention is null. Give them another type, or set linear_attention, which qwen3_next has."
            )
        for name in ("wide_qk_norm", "norm_after_rope"):
            if getattr(self.variant, name) and not self.qk_norm:
                raise ConfigError(f"variant.{name} is true, qk_norm is false: there is no norm. Set qk_norm to true.")
        rotated = self.rope.rotated(self.rotary_size)
        if rotated % 2 or rotated < 2:
            raise ConfigError(
                f"rope.partial_rotary_factor {self.rope.partial_rotary_factor} of a head of {self.rotary_size} "
                f"elements rotates {rotated}; they are rotated in pairs. Change the factor."
            )

    def _check_numerics(self) -> None:
        if not self.exact:
            return
        plain = Variant()
        departures = {
            f"variant.{name}": value
            for name in _NOT_EXACT
            if (value := getattr(self.variant, name)) != getattr(plain, name)
        }
        if self.experts is not None and self.experts.scoring == "sigmoid":
            departures["experts.scoring"] = "sigmoid"
        for name, value in departures.items():
            raise ConfigError(f"numerics is exact and {name} is {value}, which is not exact yet. Set numerics to fast.")

    @property
    def exact(self) -> bool:
        """Whether ``numerics`` is exact."""
        return self.numerics == "exact"

    @property
    def embed_scale(self) -> float | None:
        """The factor of the embedding; None for 1."""
        scale = self.variant.embed_scale
        return math.sqrt(self.hidden_dim) if scale == "sqrt_hidden_dim" else scale

    @property
    def attention_scale(self) -> float | None:
        """The factor of attention scores, with `score_factor`; None for ``head_size ** -0.5``."""
        scale, factor = self.variant.attention_scale, self.score_factor
        return scale if factor == 1 else (scale or self.head_size**-0.5) * factor

    @property
    def norm(self) -> block.Norm:
        """The norms of the model, but for their weights."""
        offset = 1.0 if self.variant.norm_plus_one else 0.0
        return block.Norm(self.layer_norm_epsilon, offset, centered=self.variant.centered_norm)

    @property
    def expert_dim(self) -> int:
        """The width of the MLP of one expert."""
        return (self.experts and self.experts.intermediate_dim) or self.intermediate_dim

    @property
    def mlp_activations(self) -> int:
        """Numbers of one token inside an MLP, at most: gate, up and product; of its experts inputs and outputs too."""
        if self.experts is None:
            return 3 * self.intermediate_dim
        inside = self.experts.num_experts_per_tok * (3 * self.expert_dim + 2 * self.hidden_dim)
        inside += 3 * (self.experts.shared_intermediate_dim or 0)
        return max(3 * self.intermediate_dim, inside) if self.mixes_mlps else inside

    def part_read(self, weight: str, tokens: float) -> float:
        """The part of a weight that a step reads, and for one token the part that it is multiplied with.

        Args:
            weight: The name of the weight. An embedding that is not the output layer too is looked up by rows: 0.
                Experts count as far as tokens are expected to be given to them (`Experts.expected_hits`).
        """
        if self.experts is not None and weight.startswith("expert_"):
            return self.experts.expected_hits(tokens) / self.experts.num_experts
        return float(weight != "embed" or self.tie_word_embeddings)
