"""Mixtral (https://arxiv.org/abs/2401.04088): a Mistral with experts in every layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import llama
from lockstep.models.families.family import ROUTED, Family, expert_fields, expert_keys, preset, windows
from lockstep.models.rope import RotaryConfig


@ModelConfig.register_subclass("mixtral")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """Mixtral (https://arxiv.org/abs/2401.04088): a Mistral with experts, of width ``intermediate_dim``.

    Example:
        >>> lockstep.models.MixtralConfig(intermediate_dim=14336).expert_dim
        14336
    """

    experts: Experts | None = dataclasses.field(default_factory=Experts)


MOE: Final = llama.LAYER + "block_sparse_moe."


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    experts = Experts(**expert_fields(hf, ROUTED, default=8))
    return {"experts": experts, **windows(hf["sliding_window"], None)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    keys = ROUTED | {"num_experts": "num_local_experts", "intermediate_dim": "intermediate_size"}
    return {**expert_keys(config, keys), "sliding_window": config.variant.sliding_window}


FAMILY: Final = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    config=MixtralConfig,
    tensors=llama.ATTENTION_TENSORS
    | {
        "router": MOE + "gate.weight",
        "expert_gate": MOE + "experts.{expert}.w1.weight",
        "expert_up": MOE + "experts.{expert}.w3.weight",
        "expert_down": MOE + "experts.{expert}.w2.weight",
    },
    defaults={
        "sliding_window": None,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    read=_read,
    write=_write,
    presets={
        "mixtral-8x7b-v0.1": preset(
            MixtralConfig, (4096, 14336, 32, 32, 8), context=32768, vocab=32000, rope=RotaryConfig(theta=1e6),
            experts=Experts(load_balancing_coef=0.02),
        ),
    },
)  # fmt: skip
