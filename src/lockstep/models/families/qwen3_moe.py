"""Qwen3 with experts (https://arxiv.org/abs/2505.09388): a Qwen3 with experts in all or some of its layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import llama, qwen3
from lockstep.models.families.family import ROUTED, Family, ModelPreset, expert_fields, expert_keys, preset, windows
from lockstep.models.families.qwen2 import WINDOW_DEFAULTS
from lockstep.models.rope import required


@ModelConfig.register_subclass("qwen3_moe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(qwen3.Qwen3Config):
    """Qwen3 with experts (https://arxiv.org/abs/2505.09388), such as Qwen3-30B-A3B.

    Example:
        >>> lockstep.models.Qwen3MoeConfig().experts.num_experts
        128
    """

    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(num_experts=128, num_experts_per_tok=8, intermediate_dim=768)
    )


MLP: Final = llama.LAYER + "mlp."
_KEYS: Final = ROUTED | {"intermediate_dim": "moe_intermediate_size", "norm_topk_prob": "norm_topk_prob"}


def read_experts(hf: Mapping[str, Any], *, shared: bool = False) -> Experts:
    """The experts of Qwen2-MoE and Qwen3-MoE, which are in every ``decoder_sparse_step``-th layer but some.

    Args:
        shared: Whether there is a shared expert too, as in Qwen2-MoE and Qwen3-Next.
    """
    step, only = hf["decoder_sparse_step"], set(hf["mlp_only_layers"] or ())
    layers = range(required(hf, "num_hidden_layers"))
    return Experts(
        mlp_only_layers=tuple(layer for layer in layers if layer in only or (layer + 1) % step),
        shared_intermediate_dim=required(hf, "shared_expert_intermediate_size") if shared else None,
        shared_router=shared,
        **expert_fields(hf, _KEYS),
    )


def write_experts(config: LlamaConfig) -> dict[str, Any]:
    """The keys of ``config.json`` that `read_experts` reads."""
    experts = config.experts or Experts()
    return {
        **expert_keys(config, _KEYS | {"num_experts": "num_experts"}),
        "num_local_experts": experts.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.mlp_only_layers),
    }


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    # In transformers all layers of this family slide or none: `max_window_layers` and `layer_types` are not read.
    return {"qk_norm": True, "experts": read_experts(hf), **windows(window, None)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    window = config.variant.sliding_window
    slides = {"use_sliding_window": window is not None} | ({} if window is None else {"sliding_window": window})
    return {"attention_bias": False, **write_experts(config), **slides}


EXPERT_TENSORS: Final = {"router": MLP + "gate.weight"} | {
    f"expert_{name}": MLP + f"experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
}
EXPERT_DEFAULTS: Final = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}


def _preset(hidden: int, layers: int, heads: int, mlp: int, width: int) -> ModelPreset:
    mixture = Experts(num_experts=128, num_experts_per_tok=8, intermediate_dim=width)
    return preset(Qwen3MoeConfig, (hidden, mlp, layers, heads, 4), head_dim=128, experts=mixture, **qwen3.COMMON)


FAMILY: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    config=Qwen3MoeConfig,
    tensors={**qwen3.FAMILY.tensors, **EXPERT_TENSORS},
    defaults={"head_dim": None, "num_key_value_heads": 4, **EXPERT_DEFAULTS, **WINDOW_DEFAULTS},
    read=_read,
    write=_write,
    # Table 2 of the paper; the rest is in each checkpoint's config.json.
    presets={
        "qwen3-30b-a3b": _preset(2048, 48, 32, 6144, 768),
        "qwen3-235b-a22b": _preset(4096, 94, 64, 12288, 1536),
    },
)
