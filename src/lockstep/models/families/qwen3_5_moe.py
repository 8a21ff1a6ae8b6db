"""Qwen3.5 with experts, its language model: small experts and a shared one in place of the MLP."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.delta_rule import LinearAttention
from lockstep.models.experts import Experts
from lockstep.models.families.family import ROUTED, Family, expert_fields, expert_keys, preset
from lockstep.models.families.qwen2_moe import SHARED_TENSORS
from lockstep.models.families.qwen3_5 import COMMON, TENSORS, Qwen35Config
from lockstep.models.families.qwen3_moe import EXPERT_TENSORS
from lockstep.models.families.qwen3_next import DEFAULTS, read_linear, small_experts, write_linear


@ModelConfig.register_subclass("qwen3_5_moe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    """Qwen3.5 with experts (https://huggingface.co/Qwen/Qwen3.5-35B-A3B), its language model."""

    intermediate_dim: int = 512
    experts: Experts | None = dataclasses.field(default_factory=lambda: small_experts(256, 8, 512))


_KEYS: Final = ROUTED | {
    "intermediate_dim": "moe_intermediate_size",
    "shared_intermediate_dim": "shared_expert_intermediate_size",
}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    # In transformers every layer has experts, whose weights are divided by their sum: other keys are not read.
    experts = Experts(shared_router=True, **expert_fields(hf, _KEYS))
    return {**read_linear(hf), "experts": experts}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {**write_linear(config), **expert_keys(config, _KEYS | {"num_experts": "num_experts"})}


FAMILY: Final = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    with_images=("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    config=Qwen35MoeConfig,
    tensors=TENSORS | EXPERT_TENSORS | SHARED_TENSORS,
    defaults={**DEFAULTS, "intermediate_size": 512, "router_aux_loss_coef": 0.001},
    read=_read,
    write=_write,
    # The config.json of each checkpoint, as others quote it.
    presets={
        "qwen3.5-35b-a3b": preset(Qwen35MoeConfig, (2048, 512, 40, 16, 2), **COMMON),
        "qwen3.5-397b-a17b": preset(
            Qwen35MoeConfig, (4096, 512, 60, 32, 2), linear_attention=LinearAttention(value_heads=64),
            experts=small_experts(512, 10, 1024), **COMMON,
        ),
    },
)  # fmt: skip
