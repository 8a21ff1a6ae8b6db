"""OLMoE (https://arxiv.org/abs/2409.02060): experts in every layer, and norms over all heads of queries and keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import llama, olmo2
from lockstep.models.families.family import ROUTED, Family, expert_fields, expert_keys, preset
from lockstep.models.families.qwen3_moe import EXPERT_TENSORS
from lockstep.models.variant import Variant

_1B: Final = Experts(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, load_balancing_coef=0.01)


@ModelConfig.register_subclass("olmoe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoeConfig(LlamaConfig):
    """OLMoE (https://arxiv.org/abs/2409.02060): experts in every layer, and norms over all heads of q and k."""

    qk_norm: bool = True
    variant: Variant = dataclasses.field(default_factory=lambda: Variant(wide_qk_norm=True))
    experts: Experts | None = _1B


_KEYS: Final = ROUTED | {"norm_topk_prob": "norm_topk_prob"}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf.get("clip_qkv") is not None:
        raise ConfigError(
            f"the checkpoint's config.json has clip_qkv {hf['clip_qkv']}; lockstep computes OLMoE without a limit of "
            "queries, keys and values, as it was published. Choose another checkpoint."
        )
    return {"qk_norm": True, "experts": Experts(**expert_fields(hf, _KEYS, default=64))}


FAMILY: Final = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    config=OlmoeConfig,
    tensors=llama.ATTENTION_TENSORS
    | {name: tensor for name, tensor in olmo2.FAMILY.tensors.items() if name.endswith("wide_norm")}
    | EXPERT_TENSORS,
    # Those of transformers.
    defaults={
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    },
    read=_read,
    write=lambda config: {
        **expert_keys(config, _KEYS | {"num_experts": "num_experts", "intermediate_dim": "intermediate_size"}),
        "attention_bias": False,
        "clip_qkv": None,
    },
    # Table 1 of the paper; the rest is in its config.json.
    presets=dict.fromkeys(
        ("olmoe-1b-7b-0924", "olmoe-1b-7b-0125"),
        preset(OlmoeConfig, (2048, 1024, 16, 16, 16), context=4096, vocab=50304),
    ),
)  # fmt: skip
