"""gpt-oss (https://arxiv.org/abs/2508.10925): experts, attention sinks, a window in every other layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import llama
from lockstep.models.families.family import (
    ROUTED,
    Family,
    ModelPreset,
    expert_fields,
    expert_keys,
    layer_types_to_hf,
    preset,
    windows,
)
from lockstep.models.rope import RotaryConfig, YarnScaling, rope_from_hf, rope_to_hf
from lockstep.models.variant import Activation, Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssVariant(Variant):
    """The switches of gpt-oss."""

    activation: Activation = "clamped_swiglu"
    attention_sinks: bool = True
    o_bias: bool = True
    sliding_window: int | None = 128
    full_attention_every: int | None = 2


@ModelConfig.register_subclass("gpt_oss")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(LlamaConfig):
    """gpt-oss (https://arxiv.org/abs/2508.10925): experts, attention sinks, a window in every other layer.

    Example:
        >>> lockstep.models.GptOssConfig().variant.attention_sinks
        True
    """

    head_dim: int | None = 64
    qkv_bias: bool = True
    rope: RotaryConfig = dataclasses.field(
        default_factory=lambda: RotaryConfig(theta=150000.0, yarn=YarnScaling(truncate=False))
    )
    variant: GptOssVariant = dataclasses.field(default_factory=GptOssVariant)
    experts: Experts | None = dataclasses.field(default_factory=lambda: Experts(num_experts=128, num_experts_per_tok=4))


MLP: Final = llama.LAYER + "mlp."
ATTENTION: Final = llama.LAYER + "self_attn."


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, only in (("attention_bias", True), ("swiglu_limit", 7.0), ("hidden_act", "silu")):
        if hf[key] != only:
            raise ConfigError(
                f"the checkpoint has {key} {hf[key]!r}; lockstep computes {only!r} for gpt-oss. Choose another "
                "checkpoint."
            )
    published = hf.get("rope_parameters") is None and not hf.get("rope_scaling")
    return {
        "qkv_bias": True,
        "activation": "clamped_swiglu",
        "experts": Experts(**expert_fields(hf, ROUTED, default=128)),
        "rope": rope_from_hf({**hf, "rope_parameters": rope_to_hf(GptOssConfig().rope)} if published else hf),
        **windows(hf["sliding_window"], hf.get("layer_types"), every=2, layers=hf["num_hidden_layers"]),
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        **expert_keys(config, ROUTED | {"num_experts": "num_local_experts", "intermediate_dim": "intermediate_size"}),
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "sliding_window": config.variant.sliding_window,
        "layer_types": layer_types_to_hf(config),
    }


def _preset(layers: int, experts: int) -> ModelPreset:
    mixture = Experts(num_experts=experts, num_experts_per_tok=4)
    return preset(GptOssConfig, (2880, 2880, layers, 64, 8), context=131072, vocab=201088, experts=mixture)


FAMILY: Final = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    config=GptOssConfig,
    tensors=llama.ATTENTION_TENSORS
    | {f"{name}_bias": ATTENTION + f"{name}_proj.bias" for name in ("q", "k", "v", "o")}
    | {
        "sinks": ATTENTION + "sinks",
        "router": MLP + "router.weight",
        "router_bias": MLP + "router.bias",
        "expert_gate_up": MLP + "experts.gate_up_proj",
        "expert_gate_up_bias": MLP + "experts.gate_up_proj_bias",
        "expert_down": MLP + "experts.down_proj",
        "expert_down_bias": MLP + "experts.down_proj_bias",
    },
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "hidden_act": "silu",
    },
    read=_read,
    write=_write,
    # Table 1 of the paper; the rest is in each checkpoint's config.json.
    presets={"gpt-oss-20b": _preset(24, 32), "gpt-oss-120b": _preset(36, 128)},
)
