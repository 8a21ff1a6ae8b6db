"""Mistral Small 4 (https://mistral.ai/news/mistral-small-4): a latent, a factor of later queries, and experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import deepseek_v2, glm4_moe
from lockstep.models.families.deepseek_v3 import DeepseekV3Config, read_latent, write_latent
from lockstep.models.families.family import Family, preset
from lockstep.models.families.ministral3 import with_query_factor
from lockstep.models.latent import Latent
from lockstep.models.rope import RotaryConfig, YarnScaling

_LATENT: Final = Latent(kv_lora_rank=256, q_lora_rank=1024, qk_nope_head_dim=64)
_YARN: Final = YarnScaling(factor=128.0, original_max_position_embeddings=8192, llama_4_scaling_beta=0.1)


@ModelConfig.register_subclass("mistral4")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral4Config(DeepseekV3Config):
    """Mistral Small 4: DeepSeek V3's latent, Ministral 3's factor of later queries, experts that a softmax chooses."""

    layer_norm_epsilon: float = 1e-6
    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(yarn=_YARN))
    latent: Latent = _LATENT
    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(
            num_experts=128, num_experts_per_tok=4, intermediate_dim=2048, shared_intermediate_dim=2048,
            load_balancing_coef=0.0,
        )
    )  # fmt: skip


_PART: Final = "partial_rotary_factor"


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    part = hf["qk_rope_head_dim"] / (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
    default = {**_rope_to_hf(Mistral4Config()), _PART: part} if hf.get("rope_parameters") is None else {}
    settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or default)
    stated = {place[_PART] for place in (settings, hf) if place.get(_PART) is not None} - {part}
    groups = hf["n_group"], hf["topk_group"]
    if stated or groups != (1, 1):
        raise ConfigError(
            f"the checkpoint's config.json has {_PART} {max(stated, default=part)}, and {groups[0]} groups of experts, "
            f"of which a token has {groups[1]}; lockstep computes Mistral 4 with {part} of each head rotated, "
            "qk_rope_head_dim / (qk_nope_head_dim + qk_rope_head_dim), and its experts in one group. Choose another "
            "checkpoint."
        )
    settings.pop(_PART, None)
    hf = {**hf, _PART: None, "rope_parameters": settings, "rope_scaling": None}
    fields = read_latent(hf)
    return {
        **fields,
        "rope": with_query_factor(fields["rope"], settings, "Mistral 4"),
        "experts": dataclasses.replace(glm4_moe.experts_from_hf(hf), scoring="softmax"),
        "interleaved_rope": hf["rope_interleave"],
    }


def _rope_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The ``rope_parameters``, which transformers reads whole or not at all."""
    part = config.rotary_size / config.head_size
    scaling = {"llama_4_scaling_beta": 0.0, **write_latent(config).get("rope_scaling", {})}
    return {**scaling, "rope_theta": config.rope.theta, _PART: part}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        **glm4_moe.experts_to_hf(config, "mistral4"),
        **write_latent(config),
        "head_dim": config.head_size,
        "rope_interleave": config.variant.interleaved_rope,
        "rope_scaling": None,
        "rope_parameters": _rope_to_hf(config),
    }


FAMILY: Final = Family(
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    config=Mistral4Config,
    with_images=("Mistral3ForConditionalGeneration", "mistral3"),
    tensors=deepseek_v2.FAMILY.tensors,
    packed_experts=True,
    # Those of transformers.
    defaults={
        **dataclasses.asdict(_LATENT), "rope_interleave": True, "num_key_value_heads": 32,
        "first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 4, "routed_scaling_factor": 1.0,
    },
    read=_read,
    write=_write,
    # The configuration of transformers, which is that of this checkpoint.
    presets={
        "mistral-small-4-119b-2603": preset(
            Mistral4Config, (4096, 12288, 36, 32, 32), context=1048576, vocab=131072
        ),
    },
)  # fmt: skip
