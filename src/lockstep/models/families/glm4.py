"""GLM-4 of April 2025 (https://huggingface.co/zai-org/GLM-4-9B-0414): norms on both sides, half of a head rotated."""

import dataclasses
from typing import Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama, phi3
from lockstep.models.families.family import Family, preset
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4Variant(Variant):
    """The switches of GLM-4."""

    post_norm: bool = True
    interleaved_rope: bool = True


@ModelConfig.register_subclass("glm4")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4Config(LlamaConfig):
    """GLM-4 (https://arxiv.org/abs/2406.12793), as GLM-4-0414 has it: norms before and after attention and MLP."""

    qkv_bias: bool = True
    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(partial_rotary_factor=0.5))
    variant: Glm4Variant = dataclasses.field(default_factory=Glm4Variant)


FAMILY: Final = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    config=Glm4Config,
    tensors=llama.TENSORS
    | {name: phi3.FAMILY.tensors[name] for name in ("gate", "up")}
    | {f"{name}_bias": llama.LAYER + f"self_attn.{name}_proj.bias" for name in "qkv"}
    | {
        "attn_post_norm": llama.LAYER + "post_self_attn_layernorm.weight",
        "mlp_norm": llama.LAYER + "post_attention_layernorm.weight",
        "mlp_post_norm": llama.LAYER + "post_mlp_layernorm.weight",
    },
    # Those of transformers.
    defaults={
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "head_dim": 128,
        "num_key_value_heads": 2,
    },
    read=lambda hf: {"qkv_bias": hf["attention_bias"]},
    write=lambda config: {"attention_bias": config.qkv_bias},
    # Its config.json.
    presets={
        "glm-4-9b-0414": preset(Glm4Config, (4096, 13696, 40, 32, 2), context=32768, vocab=151552),
    },
)
