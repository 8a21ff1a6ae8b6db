"""DeepSeek V2 and V2-Lite (https://arxiv.org/abs/2405.04434): a latent, and experts that a softmax chooses."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import glm4_moe
from lockstep.models.families.deepseek_v3 import LATENT_TENSORS, DeepseekV3Config, read_latent, write_latent
from lockstep.models.families.family import Family, ModelPreset, preset
from lockstep.models.families.qwen3_moe import EXPERT_TENSORS
from lockstep.models.latent import Latent
from lockstep.models.rope import RotaryConfig, YarnScaling, required


def _experts(number: int, width: int, *, groups: int, groups_per_tok: int, factor: float) -> Experts:
    return Experts(
        num_experts=number, num_experts_per_tok=6, intermediate_dim=width, mlp_only_layers=(0,),
        shared_intermediate_dim=2 * width, norm_topk_prob=False, groups=groups, groups_per_tok=groups_per_tok,
        routed_scaling_factor=factor, load_balancing_coef=0.0,
    )  # fmt: skip


@ModelConfig.register_subclass("deepseek_v2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekV3Config):
    """DeepSeek V2 (https://arxiv.org/abs/2405.04434): attention with a latent, experts that a softmax chooses."""

    layer_norm_epsilon: float = 1e-6
    experts: Experts | None = dataclasses.field(
        default_factory=lambda: _experts(160, 1536, groups=8, groups_per_tok=3, factor=16.0)
    )


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    method, scoring = hf["topk_method"], hf.get("scoring_func", "softmax")
    if method not in ("greedy", "group_limited_greedy") or scoring != "softmax":
        raise ConfigError(
            f"the checkpoint has topk_method {method!r} and scoring_func {scoring!r}; experts of deepseek_v2 are "
            "chosen by a softmax, 'greedy' or 'group_limited_greedy'. Choose another checkpoint."
        )
    if hf["norm_topk_prob"]:
        raise ConfigError(
            "the checkpoint has norm_topk_prob: true; transformers' deepseek_v2 does not divide the weights of experts "
            "by their sum, DeepSeek's own code does. Set it to false, or choose another checkpoint."
        )
    grouped = method == "group_limited_greedy"
    groups = {key: required(hf, key) if grouped else 1 for key in ("n_group", "topk_group")}
    experts = dataclasses.replace(glm4_moe.experts_from_hf({**hf, **groups}), scoring="softmax")
    return {**read_latent(hf), "experts": experts, "interleaved_rope": True}


def _write(config: LlamaConfig) -> dict[str, Any]:
    grouped = config.experts is not None and config.experts.groups > 1
    return {
        **glm4_moe.experts_to_hf(config, "deepseek_v2"),
        **write_latent(config),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "attention_bias": False,
    }


def _preset(hidden: int, mlp: int, layers: int, heads: int, q_rank: int | None, experts: Experts) -> ModelPreset:
    yarn = YarnScaling(factor=40.0, attention_factor=0.1 * 0.707 * math.log(40.0) + 1.0)
    return preset(
        DeepseekV2Config, (hidden, mlp, layers, heads, heads), context=163840, vocab=102400,
        latent=Latent(q_lora_rank=q_rank), rope=RotaryConfig(yarn=yarn), experts=experts,
    )  # fmt: skip


FAMILY: Final = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    config=DeepseekV2Config,
    tensors=LATENT_TENSORS
    | EXPERT_TENSORS
    | {name: tensor for name, tensor in glm4_moe.BIASED_EXPERTS.items() if name.startswith("shared_")},
    # Those of transformers.
    defaults={
        **dataclasses.asdict(Latent()), "num_key_value_heads": None, "first_k_dense_replace": 0, "n_shared_experts": 2,
        "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
    read=_read,
    write=_write,
    # Section 3.1.2 and appendix B of the paper; the rest is in each checkpoint's config.json.
    presets={
        "deepseek-v2": _preset(5120, 12288, 60, 128, 1536, DeepseekV2Config().experts or Experts()),
        "deepseek-v2-lite": _preset(
            2048, 10944, 27, 16, None, _experts(64, 1408, groups=1, groups_per_tok=1, factor=1.0)
        ),
    },
)  # fmt: skip
