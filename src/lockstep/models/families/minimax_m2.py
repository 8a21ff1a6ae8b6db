"""MiniMax-M2 (https://github.com/MiniMax-AI/MiniMax-M2): many small experts, and heads of which half is rotated."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import mixtral, olmo2
from lockstep.models.families.family import Family, expert_fields, expert_keys, preset
from lockstep.models.rope import RotaryConfig, rope_from_hf
from lockstep.models.variant import Variant

_M2: Final = Experts(num_experts=256, num_experts_per_tok=8, scoring="biased_sigmoid", load_balancing_coef=0.0)


@ModelConfig.register_subclass("minimax_m2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(LlamaConfig):
    """MiniMax-M2: experts that a bias helps to choose, norms over all heads of q and k, half of each head rotated."""

    head_dim: int | None = 128
    qk_norm: bool = True
    layer_norm_epsilon: float = 1e-6
    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(theta=5e6, partial_rotary_factor=0.5))
    variant: Variant = dataclasses.field(default_factory=lambda: Variant(wide_qk_norm=True))
    experts: Experts | None = _M2


_KEYS: Final = {"num_experts_per_tok": "num_experts_per_tok"}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    experts = dataclasses.replace(_M2, **expert_fields(hf, _KEYS, default=256))
    if hf.get("rotary_dim") is None:
        return {"qk_norm": True, "experts": experts}
    head = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
    return {
        "qk_norm": True,
        "experts": experts,
        "rope": rope_from_hf({**hf, "partial_rotary_factor": hf["rotary_dim"] / head}),
    }


FAMILY: Final = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    config=MiniMaxM2Config,
    tensors={**mixtral.FAMILY.tensors}
    | {name: tensor for name, tensor in olmo2.FAMILY.tensors.items() if name.endswith("wide_norm")}
    | {"router_bias": mixtral.MOE + "e_score_correction_bias"},
    # Those of transformers.
    defaults={
        "head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 8, "rope_theta": 5e6,
        "partial_rotary_factor": None,
    },
    read=_read,
    write=lambda config: {
        **expert_keys(config, _KEYS | {"num_experts": "num_local_experts", "intermediate_dim": "intermediate_size"}),
        "rotary_dim": config.rope.rotated(config.head_size),
    },
    # Its config.json.
    presets=dict.fromkeys(
        ("minimax-m2", "minimax-m2.1", "minimax-m2.5"),
        preset(MiniMaxM2Config, (3072, 1536, 62, 48, 8), context=196608, vocab=200064),
    ),
)  # fmt: skip
