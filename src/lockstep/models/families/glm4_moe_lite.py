"""GLM-4.7-Flash (https://huggingface.co/zai-org/GLM-4.7-Flash): the latent and the experts of DeepSeek V3."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import deepseek_v3, glm4_moe
from lockstep.models.families.deepseek_v3 import DeepseekV3Config
from lockstep.models.families.family import Family
from lockstep.models.latent import Latent

_LATENT: Final = Latent(kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64, v_head_dim=256, qk_nope_head_dim=192)


@ModelConfig.register_subclass("glm4_moe_lite")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """GLM-4.7-Flash: DeepSeek V3 with other sizes."""

    latent: Latent = _LATENT
    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(
            num_experts=64, num_experts_per_tok=4, intermediate_dim=1536, mlp_only_layers=(0,),
            shared_intermediate_dim=1536, scoring="biased_sigmoid", routed_scaling_factor=1.8, load_balancing_coef=0.0,
        )
    )  # fmt: skip


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    size = hf["qk_rope_head_dim"]
    if hf.get("head_dim", size) != size:
        raise ConfigError(
            f"the checkpoint's config.json has head_dim {hf['head_dim']} and qk_rope_head_dim {size}, which are two "
            "names of one number in glm4_moe_lite. Keep the one that its tensors have."
        )
    experts, types = glm4_moe.experts_from_hf(hf), hf.get("mlp_layer_types")
    if types is not None:
        dense = tuple(layer for layer, type_ in enumerate(types) if type_ == "dense")
        experts = dataclasses.replace(experts, mlp_only_layers=dense)
    return {**deepseek_v3.read_latent(hf), "experts": experts, "interleaved_rope": hf["rope_interleave"]}


def _write(config: LlamaConfig) -> dict[str, Any]:
    experts = config.experts or Experts()
    only, everywhere = experts.mlp_only_layers, dataclasses.replace(experts, mlp_only_layers=())
    return {
        **glm4_moe.experts_to_hf(dataclasses.replace(config, experts=everywhere), "glm4_moe_lite"),
        **deepseek_v3.write_latent(config),
        "rope_interleave": config.variant.interleaved_rope,
        "first_k_dense_replace": next(layer for layer in range(config.num_layers + 1) if layer not in only),
        "mlp_layer_types": ["dense" if layer in only else "sparse" for layer in range(config.num_layers)],
    }


FAMILY: Final = Family(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    config=Glm4MoeLiteConfig,
    tensors=deepseek_v3.FAMILY.tensors,
    # Those of transformers.
    defaults={
        **dataclasses.asdict(_LATENT), "rope_interleave": True, "num_key_value_heads": 20, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
    },
    read=_read,
    write=_write,
)  # fmt: skip
