"""Qwen3.5 with experts, its language model: small experts and a shared one in place of the MLP."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.delta_rule import LinearAttention
from lockstep.models.experts import Experts
from lockstep.models.families.family import Family, ModelPreset, count_experts
from lockstep.models.families.qwen2_moe import SHARED_TENSORS
from lockstep.models.families.qwen3_5 import TENSORS, Qwen35Config
from lockstep.models.families.qwen3_moe import EXPERT_TENSORS
from lockstep.models.families.qwen3_next import DEFAULTS, read_linear, write_linear
from lockstep.models.rope import required


@ModelConfig.register_subclass("qwen3_5_moe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    """Qwen3.5 with experts (https://huggingface.co/Qwen/Qwen3.5-35B-A3B), its language model."""

    intermediate_dim: int = 512
    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(
            num_experts=256, num_experts_per_tok=8, intermediate_dim=512, shared_intermediate_dim=512,
            shared_router=True,
        )
    )  # fmt: skip


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    # In transformers every layer has experts, whose weights are divided by their sum: other keys are not read.
    experts = Experts(
        num_experts=count_experts(hf),
        num_experts_per_tok=required(hf, "num_experts_per_tok"),
        intermediate_dim=required(hf, "moe_intermediate_size"),
        shared_intermediate_dim=required(hf, "shared_expert_intermediate_size"),
        shared_router=True,
        load_balancing_coef=hf["router_aux_loss_coef"],
    )
    return {**read_linear(hf), "experts": experts}


def _write(config: LlamaConfig) -> dict[str, Any]:
    experts = config.experts or Experts()
    return {
        **write_linear(config),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": config.expert_dim,
        "shared_expert_intermediate_size": experts.shared_intermediate_dim,
        "router_aux_loss_coef": experts.load_balancing_coef,
    }


def _preset(
    hidden: int, layers: int, heads: int, *, experts: int, top: int, width: int, value_heads: int
) -> ModelPreset:
    config = Qwen35MoeConfig(
        max_seq_len=262144, hidden_dim=hidden, num_layers=layers, num_heads=heads, num_kv_heads=2,
        linear_attention=LinearAttention(value_heads=value_heads),
        experts=Experts(
            num_experts=experts, num_experts_per_tok=top, intermediate_dim=width, shared_intermediate_dim=width,
            shared_router=True,
        ),
    )  # fmt: skip
    return ModelPreset(config=config, vocab_size=248320)


FAMILY: Final = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    reads_images_as="qwen3_5_moe",
    config=Qwen35MoeConfig,
    tensors=TENSORS | EXPERT_TENSORS | SHARED_TENSORS,
    defaults={**DEFAULTS, "intermediate_size": 512, "router_aux_loss_coef": 0.001},
    read=_read,
    write=_write,
    # The config.json of each checkpoint, as others quote it.
    presets={
        "qwen3.5-35b-a3b": _preset(2048, 40, 16, experts=256, top=8, width=512, value_heads=32),
        "qwen3.5-397b-a17b": _preset(4096, 60, 32, experts=512, top=10, width=1024, value_heads=64),
    },
)
