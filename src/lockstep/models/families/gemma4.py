"""Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4), its language model: heads of another size, whose values
may be keys, in the layers without a window.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.models import block
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import gemma2, llama
from lockstep.models.families.family import Family, layer_types_to_hf, preset, windows
from lockstep.models.layer_kinds import every_nth_full
from lockstep.models.rope import RotaryConfig, required
from lockstep.models.variant import Variant
from lockstep.models.weights import MLP_WEIGHTS, WIDE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalRotary(RotaryConfig):
    """Rotary embeddings with the frequencies of whole heads, of which the first pairs alone are rotated.

    Example:
        >>> int((ProportionalRotary(rotated_part=0.25).frequencies(512) > 0).sum())
        64
    """

    rotated_part: float = 1.0
    """The part of the pairs of a head that are rotated, the fastest ones; the others have no position."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rotated_part <= 1 or self.partial_rotary_factor != 1 or self.scaling or self.yarn:
            raise ConfigError(
                f"rope is {self}; of Gemma 4 rotated_part must be more than 0 and at most 1, and beside it there are "
                "theta and linear_factor alone. Correct it."
            )

    def frequencies(self, head_size: int) -> Float[np.ndarray, " half_head"]:
        """See `RotaryConfig`. Source: ``transformers/modeling_rope_utils.py``, rope type ``proportional``."""
        rotated = int(self.rotated_part * head_size // 2)
        exponents = np.arange(0, 2 * rotated, 2, dtype=np.float32) / np.float32(head_size)
        frequencies = np.float32(1.0) / np.float32(self.theta) ** exponents / np.float32(self.linear_factor)
        return np.pad(frequencies, (0, head_size // 2 - rotated))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideHeads:
    """The heads of layers without a window."""

    num_kv_heads: int = 4
    """The number of key/value heads; divides ``num_heads``."""
    head_dim: int = 512
    """The size of a head."""
    keys_are_values: bool = True
    """Whether values are the keys before their norm and rotation, so that there is no projection of values."""

    def __post_init__(self) -> None:
        check_fields(self, "wide.")
        check_at_least(self, 1, "num_kv_heads", block="wide.")
        check_at_least(self, 2, "head_dim", block="wide.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormedExperts(Experts):
    """Experts beside an MLP, which is the shared one; each with norms of its own."""

    own_norms = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Variant(Variant):
    """The switches of Gemma 4."""

    activation: Any = "gelu_tanh"
    post_norm: bool = True
    embed_scale: Any = "sqrt_hidden_dim"
    attention_scale: float | None = 1.0
    logit_soft_cap: float | None = 30.0
    sliding_window: int | None = 1024
    full_attention_every: int | None = 6
    sliding_rope: RotaryConfig | None = dataclasses.field(default_factory=RotaryConfig)


@ModelConfig.register_subclass("gemma4")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(LlamaConfig):
    """Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4), its language model, without per-layer inputs."""

    num_layers: int = 60
    head_dim: int | None = 256
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    rope: ProportionalRotary = dataclasses.field(
        default_factory=lambda: ProportionalRotary(theta=1e6, rotated_part=0.25)
    )
    qk_norm: bool = True
    variant: Gemma4Variant = dataclasses.field(default_factory=Gemma4Variant)
    wide: WideHeads | None = WideHeads()
    """The heads of layers without a window. Null where they are as those of the others."""
    experts: NormedExperts | None = None
    """The experts beside the MLP of each layer, whose width is ``shared_intermediate_dim`` (26B-A4B). Null for none."""

    norms_values = layer_scalars = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exact:
            raise ConfigError(
                "numerics is exact, and Gemma 4 has norms of values, whose sums are not exact yet. Set numerics to "
                "fast."
            )
        if self.experts is not None and self.experts.shared_intermediate_dim != self.intermediate_dim:
            raise ConfigError(
                f"experts.shared_intermediate_dim is {self.experts.shared_intermediate_dim} and intermediate_dim is "
                f"{self.intermediate_dim}; both are the width of the MLP beside experts. Set them to the same number."
            )
        if self.experts is not None and self.experts.mlp_only_layers:
            raise ConfigError(
                f"experts.mlp_only_layers is {list(self.experts.mlp_only_layers)}; all layers of Gemma 4 have experts, "
                "or none. Leave it out."
            )
        if self.wide is None:
            return
        kinds = self.attention_kinds
        if len({*kinds}) < 2 or kinds[-1] != "wide":
            raise ConfigError(
                f"variant has the layer types {self.layer_types}; of Gemma 4 with wide heads some layers have "
                "sliding_attention, and the last one has full_attention. Correct layer_types, full_attention_every or "
                "num_layers."
            )
        if self.num_heads % self.wide.num_kv_heads or self.wide.head_dim % 2:
            raise ConfigError(
                f"wide is {self.wide} and num_heads is {self.num_heads}; wide.num_kv_heads must divide num_heads, and "
                "wide.head_dim must be even. Correct them."
            )

    @property
    def norm(self) -> block.Norm:
        return dataclasses.replace(super().norm, float32=True)

    @property
    def keys_are_values(self) -> bool:
        return self.wide is not None and self.wide.keys_are_values

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        types = self.layer_types or ("full_attention",) * self.num_layers
        wide = None if self.wide is None else "full_attention"
        return tuple("wide" if kind == wide else "full" for kind in types)

    def of_attention(self, kind: str) -> "Gemma4Config":
        return _of_attention(self, kind)

    def with_kv_heads(self, counts: Mapping[str, int]) -> "Gemma4Config":
        config = super().with_kv_heads(counts)
        if self.wide is None or "wide" not in counts:
            return config
        return dataclasses.replace(config, wide=dataclasses.replace(self.wide, num_kv_heads=counts["wide"]))


@functools.lru_cache
def _of_attention(config: Gemma4Config, kind: str) -> Gemma4Config:
    if (wide := config.wide) is None:
        return config
    same: dict[str, Any] = {"sliding_rope": None, "layer_types": None, "full_attention_every": None}
    if kind == "full":
        rope = config.variant.sliding_rope or config.rope
        if not isinstance(rope, ProportionalRotary):
            rope = ProportionalRotary(theta=rope.theta, linear_factor=rope.linear_factor)
        return dataclasses.replace(config, wide=None, rope=rope, variant=dataclasses.replace(config.variant, **same))
    variant = dataclasses.replace(config.variant, **same, sliding_window=None)
    heads: dict[str, Any] = {"num_kv_heads": wide.num_kv_heads, "head_dim": wide.head_dim}
    return dataclasses.replace(config, wide=None, variant=variant, **heads)


_NOT_COMPUTED: Final = {
    "hidden_size_per_layer_input": "embeddings of each layer (E2B, E4B)",
    "num_kv_shared_layers": "layers that attend with the keys and values of others (E2B, E4B)",
    "use_double_wide_mlp": "MLPs of two widths (E2B)",
}
"""Settings of other models of the family, and what they need."""


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, need in _NOT_COMPUTED.items():
        if hf[key]:
            raise ConfigError(
                f"the checkpoint has {key} {hf[key]!r}, which needs {need}; lockstep computes Gemma 4 as its 31B and "
                f"26B-A4B have it, with {key} {type(hf[key])()!r}. Choose a checkpoint such as google/gemma-4-31B."
            )
    if hf["use_bidirectional_attention"] not in (None, False, "vision"):  # of images, which are not read here
        raise ConfigError(
            f"the checkpoint has use_bidirectional_attention {hf['use_bidirectional_attention']!r}; lockstep has "
            "causal attention only. Choose another checkpoint."
        )
    layers = required(hf, "num_hidden_layers")
    types = list(hf.get("layer_types") or every_nth_full(layers, 6))
    types[-1:] = ["full_attention"]  # as in transformers, whatever the file says
    fields = windows(hf["sliding_window"], types, every=6, layers=layers)
    if "sliding_attention" in types:
        required(hf, "sliding_window")
    ropes = {**_ROPES, **(hf.get("rope_parameters") or {})}
    part, beside = ropes["full_attention"].get("partial_rotary_factor"), hf.get("partial_rotary_factor")
    if "rope_scaling" in hf or beside not in (None, part):
        raise ConfigError(
            f"the checkpoint has rope_scaling {hf.get('rope_scaling')} and partial_rotary_factor {beside} beside "
            f"rope_parameters {dict(ropes)}; some versions of transformers read them, and some do not. Keep what is in "
            "rope_parameters, for each kind of layers."
        )
    sliding = _rope_from_hf(ropes["sliding_attention"])
    return {
        "qk_norm": True,
        **fields,
        "logit_soft_cap": hf["final_logit_softcapping"],
        "rope": _rope_from_hf(ropes["full_attention"]),
        "sliding_rope": None if fields["sliding_window"] is None else _plain(sliding),
        "wide": _wide_from_hf(hf, types),
        "experts": _experts_from_hf(hf) if hf["enable_moe_block"] else None,
    }


def _wide_from_hf(hf: Mapping[str, Any], types: list[str]) -> WideHeads | None:
    """The heads of layers without a window, in either spelling: by two keys, or layer by layer (transformers 5.24)."""
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    kv_heads, head_dim = hf.get("num_key_value_heads") or hf["num_attention_heads"], hf["head_dim"]
    own = {"head_dim": hf["global_head_dim"], "num_key_value_heads": hf["num_global_key_value_heads"]}
    if not hf["attention_k_eq_v"]:
        own.pop("num_key_value_heads")  # as in transformers
    by_layer = hf.get("per_layer_config")
    if by_layer is not None:
        settings = [by_layer.get(str(layer), by_layer.get(layer)) or {} for layer in full]
        own, known = settings[0], {"head_dim", "num_key_value_heads"}
        if settings != [own] * len(full) or len(by_layer) != len(full) or own.keys() - known:
            raise ConfigError(
                f"the checkpoint has per_layer_config {by_layer}; lockstep computes one head_dim and one "
                f"num_key_value_heads of all layers with full_attention, here {full}, and those of config.json in the "
                "others. Choose another checkpoint."
            )
    wide = WideHeads(
        head_dim=own.get("head_dim") or head_dim,
        num_kv_heads=own.get("num_key_value_heads") or kv_heads,
        keys_are_values=bool(hf["attention_k_eq_v"]),
    )
    plain = WideHeads(head_dim=head_dim, num_kv_heads=kv_heads, keys_are_values=False)
    return None if wide == plain or len(full) == len(types) else wide


def _experts_from_hf(hf: Mapping[str, Any]) -> NormedExperts:
    fields = {name: required(hf, key) for name, key in _EXPERTS.items()}
    return NormedExperts(**fields, shared_intermediate_dim=required(hf, "intermediate_size"), load_balancing_coef=0.0)


_EXPERTS: Final = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k_experts",
    "intermediate_dim": "moe_intermediate_size",
}
"""Keys of ``config.json`` by the field of `Experts`."""

_ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
"""The ``rope_parameters`` of a file that has none."""


def _rope_from_hf(parameters: Mapping[str, Any]) -> ProportionalRotary:
    kind, theta = parameters.get("rope_type", "default"), required(parameters, "rope_theta")
    if kind == "default":
        return ProportionalRotary(theta=theta)
    if kind != "proportional":
        raise ConfigError(
            f"the checkpoint has rope type {kind!r}; of Gemma 4 lockstep computes 'default' and 'proportional'. Choose "
            "another checkpoint."
        )
    part, factor = parameters.get("partial_rotary_factor", 1.0), parameters.get("factor", 1.0)
    return ProportionalRotary(theta=theta, rotated_part=part, linear_factor=factor)


def _plain(rope: ProportionalRotary) -> RotaryConfig:
    """Rotary embeddings that rotate whole heads in the spelling of other families."""
    return rope if rope.rotated_part != 1 else RotaryConfig(theta=rope.theta, linear_factor=rope.linear_factor)


def _rope_to_hf(rope: RotaryConfig) -> dict[str, Any]:
    part = getattr(rope, "rotated_part", 1.0)
    if part == 1 and rope.linear_factor == 1:
        return {"rope_type": "default", "rope_theta": rope.theta}
    factor = {} if rope.linear_factor == 1 else {"factor": rope.linear_factor}
    return {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": rope.theta, **factor}


def _write(config: LlamaConfig) -> dict[str, Any]:
    wide, sliding = config.of_attention("wide"), config.variant.sliding_rope or config.rope
    return {
        "layer_types": layer_types_to_hf(config),
        "sliding_window": config.variant.sliding_window,
        "final_logit_softcapping": config.variant.logit_soft_cap,
        "rope_parameters": {"full_attention": _rope_to_hf(config.rope), "sliding_attention": _rope_to_hf(sliding)},
        "global_head_dim": wide.head_size,
        "num_global_key_value_heads": wide.num_kv_heads if config.keys_are_values else None,
        "attention_k_eq_v": config.keys_are_values,
        "attention_bias": False,
        **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0),
        "use_double_wide_mlp": False,
        "enable_moe_block": config.experts is not None,
        **{key: getattr(config.experts, name, None) for name, key in _EXPERTS.items()},
    }


_TENSORS: Final = gemma2.TENSORS | {
    **{f"{name}_norm": llama.LAYER + f"self_attn.{name}_norm.weight" for name in "qk"},
    "layer_scalar": llama.LAYER + "layer_scalar",
    "router": llama.LAYER + "router.proj.weight",
    "router_scale": llama.LAYER + "router.scale",
    "router_factors": llama.LAYER + "router.per_expert_scale",
    **{f"expert_{name}": llama.LAYER + f"experts.{{expert}}.{name}_proj.weight" for name in MLP_WEIGHTS},
    **{f"shared_{name}": llama.LAYER + f"mlp.{name}_proj.weight" for name in MLP_WEIGHTS},
    "shared_post_norm": llama.LAYER + "post_feedforward_layernorm_1.weight",
    "routed_norm": llama.LAYER + "pre_feedforward_layernorm_2.weight",
    "routed_post_norm": llama.LAYER + "post_feedforward_layernorm_2.weight",
}

FAMILY: Final = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    with_images=("Gemma4ForConditionalGeneration", "gemma4"),
    config=Gemma4Config,
    packed_experts=True,
    tensors=_TENSORS | {wide: _TENSORS[name] for name, wide in WIDE.items()},
    # Those of transformers.
    defaults={
        "head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 512,
        "final_logit_softcapping": None, "max_position_embeddings": 131072, "vocab_size": 262144,
        "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "enable_moe_block": False, "attention_k_eq_v": False, "global_head_dim": 512,
        "num_global_key_value_heads": None, "use_bidirectional_attention": None,
    },
    read=_read,
    write=_write,
    unwritten=frozenset(("rope_theta", "rope_scaling")),
    activation_key="hidden_activation",
    # Sizes as public pages give them; a test holds their parameters against those that are published.
    presets={
        "gemma-4-31b": preset(Gemma4Config, (5376, 21504, 60, 32, 16), context=262144, vocab=262144),
        "gemma-4-26b-a4b": preset(
            Gemma4Config, (2816, 2112, 30, 16, 8), context=262144, vocab=262144, wide=WideHeads(num_kv_heads=2),
            experts=NormedExperts(
                num_experts=128, num_experts_per_tok=8, intermediate_dim=704, shared_intermediate_dim=2112,
                load_balancing_coef=0.0,
            ),
        ),
    },
)  # fmt: skip
