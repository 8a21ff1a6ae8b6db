"""GLM-4.5 (https://arxiv.org/abs/2508.06471): experts that a bias helps to choose, after some layers without."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import llama, qwen3
from lockstep.models.families.family import Family, ModelPreset, expert_fields, expert_keys, preset
from lockstep.models.families.qwen3_moe import EXPERT_TENSORS, MLP
from lockstep.models.rope import RotaryConfig, required


@ModelConfig.register_subclass("glm4_moe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(LlamaConfig):
    """GLM-4.5 (https://arxiv.org/abs/2508.06471): experts that a bias helps to choose, after some layers without."""

    _biased_norms: ClassVar[bool] = True

    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(partial_rotary_factor=0.5))
    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(
            num_experts=128, num_experts_per_tok=8, intermediate_dim=1408, mlp_only_layers=(0,),
            shared_intermediate_dim=1408, scoring="biased_sigmoid", load_balancing_coef=0.0,
        )
    )  # fmt: skip


_KEYS: Final = {
    **{name: name for name in ("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor")},
    "groups": "n_group",
    "groups_per_tok": "topk_group",
}


def experts_from_hf(hf: Mapping[str, Any]) -> Experts:
    """The experts of a ``config.json``, in DeepSeek V3's words."""
    width = required(hf, "moe_intermediate_size")
    return Experts(
        intermediate_dim=width,
        mlp_only_layers=tuple(range(hf["first_k_dense_replace"])),
        shared_intermediate_dim=width * hf["n_shared_experts"],
        scoring="biased_sigmoid",
        load_balancing_coef=0.0,
        **expert_fields(
            {**hf, "routed_scaling_factor": float(hf["routed_scaling_factor"])},
            _KEYS,
            names=("n_routed_experts", "num_local_experts"),
        ),
    )


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": hf["attention_bias"], "qk_norm": hf["use_qk_norm"], "experts": experts_from_hf(hf)}


def experts_to_hf(config: LlamaConfig, family: str) -> dict[str, Any]:
    """The keys of a ``config.json`` that `experts_from_hf` reads.

    Args:
        family: The name of the family, for errors.

    Raises:
        ConfigError: They cannot say it.
    """
    experts = config.experts or Experts()
    shared, only = experts.shared_intermediate_dim or 0, experts.mlp_only_layers
    if shared % config.expert_dim or only != tuple(range(len(only))):
        raise ConfigError(
            f"{family} has a shared expert as wide as some of the others, and MLPs in its first layers alone; "
            f"experts.shared_intermediate_dim is {shared} beside {config.expert_dim}, experts.mlp_only_layers is "
            f"{list(only)}. Change them to save the model as such."
        )
    return {
        **expert_keys(config, _KEYS | {"num_experts": "n_routed_experts", "intermediate_dim": "moe_intermediate_size"}),
        "n_shared_experts": shared // config.expert_dim,
        "first_k_dense_replace": len(only),
        "num_nextn_predict_layers": 0,
        "output_router_logits": False,
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "use_qk_norm": config.qk_norm, **experts_to_hf(config, "glm4_moe")}


def _preset(
    hidden: int, mlp: int, layers: int, experts: int, width: int, *, dense: int, norm: bool, scale: float
) -> ModelPreset:
    mixture = Experts(
        num_experts=experts, num_experts_per_tok=8, intermediate_dim=width, mlp_only_layers=tuple(range(dense)),
        shared_intermediate_dim=width, scoring="biased_sigmoid", routed_scaling_factor=scale, load_balancing_coef=0.0,
    )  # fmt: skip
    return preset(
        Glm4MoeConfig, (hidden, mlp, layers, 96, 8), context=131072, vocab=151552, head_dim=128, qkv_bias=True,
        qk_norm=norm, rope=RotaryConfig(theta=1e6, partial_rotary_factor=0.5), experts=mixture,
    )  # fmt: skip


BIASED_EXPERTS: Final = (
    EXPERT_TENSORS
    | {f"shared_{name}": f"{MLP}shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}
    | {"router_bias": MLP + "gate.e_score_correction_bias"}
)
"""The tensors of experts that `experts_from_hf` reads."""

FAMILY: Final = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    config=Glm4MoeConfig,
    tensors={**qwen3.FAMILY.tensors, **BIASED_EXPERTS}
    | {f"{name}_bias": llama.LAYER + f"self_attn.{name}_proj.bias" for name in "qkv"},
    # Those of transformers.
    defaults={
        "attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "head_dim": None, "num_key_value_heads": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    read=_read,
    write=_write,
    # Table 1 of the paper; the rest is in each checkpoint's config.json.
    presets={
        "glm-4.5": _preset(5120, 12288, 92, 160, 1536, dense=3, norm=True, scale=2.5),
        "glm-4.5-air": _preset(4096, 10944, 46, 128, 1408, dense=1, norm=False, scale=1.0),
    },
)  # fmt: skip
