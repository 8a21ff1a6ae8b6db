"""Qwen2 with experts (https://arxiv.org/abs/2407.10671), a shared one among them that every token is given to."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import qwen2
from lockstep.models.families.family import Family, preset, windows
from lockstep.models.families.qwen3_moe import EXPERT_DEFAULTS, EXPERT_TENSORS, MLP, read_experts, write_experts
from lockstep.models.rope import RotaryConfig


@ModelConfig.register_subclass("qwen2_moe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(qwen2.Qwen2Config):
    """Qwen2 with experts (https://arxiv.org/abs/2407.10671), such as Qwen2-57B-A14B.

    Example:
        >>> lockstep.models.Qwen2MoeConfig().experts.shared_intermediate_dim
        20480
    """

    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(
            num_experts=64, num_experts_per_tok=8, intermediate_dim=2560, norm_topk_prob=False,
            shared_intermediate_dim=20480, shared_router=True,
        )
    )  # fmt: skip


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers, most = range(hf["num_hidden_layers"]), hf["max_window_layers"]
    types = ["sliding_attention" if layer < most and layer % 2 == 0 else "full_attention" for layer in layers]
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    slides = windows(window, hf.get("layer_types") or types)
    return {"qkv_bias": hf["qkv_bias"], "experts": read_experts(hf, shared=True), **slides}


def _write(config: LlamaConfig) -> dict[str, Any]:
    experts = config.experts or Experts()
    return {
        "qkv_bias": config.qkv_bias,
        "shared_expert_intermediate_size": experts.shared_intermediate_dim,
        **write_experts(config),
        **qwen2.write_windows(config),
    }


SHARED: Final = MLP + "shared_expert"
SHARED_TENSORS: Final = {f"shared_{name}": f"{SHARED}.{name}_proj.weight" for name in ("gate", "up", "down")} | {
    "shared_router": f"{SHARED}_gate.weight"
}
FAMILY: Final = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    config=Qwen2MoeConfig,
    tensors={**qwen2.FAMILY.tensors, **EXPERT_TENSORS, **SHARED_TENSORS},
    defaults={"qkv_bias": True, "num_key_value_heads": 16, **EXPERT_DEFAULTS, **qwen2.WINDOW_DEFAULTS},
    read=_read,
    write=_write,
    # Table 1 of the paper; the rest is in the checkpoint's config.json.
    presets={
        "qwen2-57b-a14b": preset(
            Qwen2MoeConfig, (3584, 18944, 28, 28, 4), context=131072, vocab=151936, rope=RotaryConfig(theta=1e6)
        ),
    },
)
