"""Qwen3-Next: three layers of four with a gated delta network, gated attention in the fourth, many small experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.delta_rule import LinearAttention
from lockstep.models.experts import Experts
from lockstep.models.families import llama, qwen3
from lockstep.models.families.family import Family, preset
from lockstep.models.families.qwen2_moe import SHARED_TENSORS
from lockstep.models.families.qwen3_moe import EXPERT_DEFAULTS, EXPERT_TENSORS, read_experts, write_experts
from lockstep.models.layer_kinds import every_nth_full
from lockstep.models.rope import RotaryConfig, required
from lockstep.models.variant import Variant


def small_experts(number: int, top: int, width: int) -> Experts:
    """Experts of a width, and a shared one with a router."""
    return Experts(
        num_experts=number, num_experts_per_tok=top, intermediate_dim=width, shared_intermediate_dim=width,
        shared_router=True,
    )  # fmt: skip


_KEYS: Final = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
    "full_attention_every": "full_attention_interval",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextVariant(Variant):
    """The switches of Qwen3-Next."""

    norm_plus_one: bool = True
    gated_attention: bool = True


@ModelConfig.register_subclass("qwen3_next")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(qwen3.Qwen3Config):
    """Qwen3-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): linear attention in most layers."""

    head_dim: int | None = 256
    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(theta=1e7, partial_rotary_factor=0.25))
    variant: Qwen3NextVariant = dataclasses.field(default_factory=Qwen3NextVariant)
    linear_attention: LinearAttention | None = LinearAttention()
    """The layers with linear attention, beside others with attention over all positions. Null for none."""
    experts: Experts | None = dataclasses.field(default_factory=lambda: small_experts(512, 10, 512))

    def __post_init__(self) -> None:
        if self.exact and self.linear_attention is not None:
            raise ConfigError(
                "numerics is exact and linear_attention is set: the sums in its memory are made of 64 positions at a "
                "time in training, of a page in prefill, of one in decode, so that they round differently. Set "
                "numerics to fast."
            )
        super().__post_init__()
        linear = len(self.linear_layers)
        if self.linear_attention is not None and linear in (0, self.num_layers):
            raise ConfigError(
                f"linear_attention is {self.linear_attention}, and {linear} of {self.num_layers} layers have it "
                "(full_attention_every, or variant.layer_types); some layers have it, and some have attention over all "
                "positions. Correct them, or set linear_attention to null where no layer has it."
            )


def read_linear(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of attention of Qwen3-Next and Qwen3.5."""
    usual = every_nth_full(required(hf, "num_hidden_layers"), hf["full_attention_interval"], "linear_attention")
    types = tuple(hf.get("layer_types") or usual)
    if unknown := sorted({*types} - {"linear_attention", "full_attention"}):
        raise ConfigError(
            f"the checkpoint's config.json has layer_types {unknown}; a layer of Qwen3-Next or Qwen3.5 has "
            "linear_attention or full_attention. Correct it."
        )
    linear = "linear_attention" in types
    return {
        "qk_norm": True,
        "layer_types": types if linear and types != usual else None,
        "linear_attention": LinearAttention(**{ours: hf[key] for ours, key in _KEYS.items()}) if linear else None,
    }


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_linear(hf), "experts": read_experts(hf, shared=True)}


def write_linear(config: LlamaConfig) -> dict[str, Any]:
    """The keys of ``config.json`` that `read_linear` reads."""
    linear = config.linear_attention or LinearAttention()
    return {
        "attention_bias": False,
        "layer_types": list(config.layer_types or ("full_attention",) * config.num_layers),
        **{key: getattr(linear, ours) for ours, key in _KEYS.items()},
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        **write_linear(config),
        "shared_expert_intermediate_size": (config.experts or Experts()).shared_intermediate_dim,
        **write_experts(config),
    }


LINEAR: Final = llama.LAYER + "linear_attn."
GATED_TENSORS: Final = {name: tensor for name, tensor in llama.ATTENTION_TENSORS.items() if name != "q"} | {
    "gated_q": llama.LAYER + "self_attn.q_proj.weight",
    **{f"{name}_norm": llama.LAYER + f"self_attn.{name}_norm.weight" for name in "qk"},
}
"""The tensors of gated attention, and of norms and embedding."""
STATE_TENSORS: Final = {
    **{f"linear_conv_{name}": LINEAR + "conv1d.weight" for name in "qkv"},
    "linear_decay": LINEAR + "A_log",
    "linear_decay_bias": LINEAR + "dt_bias",
    "linear_norm": LINEAR + "norm.weight",
    "linear_o": LINEAR + "out_proj.weight",
}
"""The tensors of linear attention but its projection."""
DEFAULTS: Final = {
    "head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""The values of keys that a ``config.json`` lacks, as in transformers."""
FAMILY: Final = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    config=Qwen3NextConfig,
    tensors=GATED_TENSORS
    | {name: llama.LAYER + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    | {"linear_qkvz": LINEAR + "in_proj_qkvz.weight", "linear_gates": LINEAR + "in_proj_ba.weight"}
    | STATE_TENSORS
    | EXPERT_TENSORS
    | SHARED_TENSORS,
    defaults={**DEFAULTS, **EXPERT_DEFAULTS, "norm_topk_prob": True},
    read=_read,
    write=_write,
    # The config.json of the checkpoint.
    presets={
        "qwen3-next-80b-a3b": preset(Qwen3NextConfig, (2048, 5120, 48, 16, 2), context=262144, vocab=151936),
    },
)  # fmt: skip
