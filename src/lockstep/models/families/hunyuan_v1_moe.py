"""Hunyuan with experts (https://github.com/Tencent-Hunyuan/Hunyuan-A13B): a token's own, and one for all tokens."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import hunyuan_v1_dense, llama
from lockstep.models.families.family import Family
from lockstep.models.families.hunyuan_v1_dense import HunyuanConfig
from lockstep.models.families.qwen3_moe import EXPERT_TENSORS, MLP
from lockstep.models.rope import required


@ModelConfig.register_subclass("hunyuan_v1_moe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class HunyuanMoeConfig(HunyuanConfig):
    """Hunyuan with experts, of which all tokens share one that is as wide as the others."""

    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(
            num_experts=64, num_experts_per_tok=8, shared_intermediate_dim=11008, load_balancing_coef=0.0
        )
    )


def _number(hf: Mapping[str, Any], *keys: str) -> int:
    """A number that has several names, and that the file may have for each layer; 1 where it has none."""
    stated = {key: required(hf, key) for key in keys if key in hf}
    numbers = {number for value in stated.values() for number in (value if isinstance(value, list) else [value])}
    if len(numbers) > 1:
        raise ConfigError(
            f"the checkpoint's config.json has {stated}; lockstep computes the same number of experts in all layers. "
            "Choose another checkpoint, or keep one name where one number has two."
        )
    return int(next(iter(numbers), 1))


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    experts = Experts(
        num_experts=_number(hf, "num_experts", "num_local_experts"),
        num_experts_per_tok=_number(hf, "moe_topk", "num_experts_per_tok"),
        shared_intermediate_dim=required(hf, "intermediate_size"),
        load_balancing_coef=0.0,
    )
    return {**hunyuan_v1_dense.read_attention(hf), "experts": experts}


def _write(config: LlamaConfig) -> dict[str, Any]:
    experts = config.experts or Experts()
    return {
        "attention_bias": False,
        "num_experts": experts.num_experts,
        "moe_topk": experts.num_experts_per_tok,
        "intermediate_size": config.expert_dim,
    }


FAMILY: Final = Family(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    config=HunyuanMoeConfig,
    tensors=llama.ATTENTION_TENSORS
    | hunyuan_v1_dense.TENSORS
    | EXPERT_TENSORS
    | {f"shared_{name}": f"{MLP}shared_mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    | {"router": MLP + "gate.wg.weight"},
    defaults={"rms_norm_eps": 1e-5},  # that of transformers
    read=_read,
    write=_write,
)
