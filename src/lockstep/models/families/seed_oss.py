"""Seed-OSS (https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct): a Llama with biases of attention."""

import dataclasses
from typing import Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family


@ModelConfig.register_subclass("seed_oss")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    """Seed-OSS: a Llama with biases on query, key and value."""

    layer_norm_epsilon: float = 1e-6
    qkv_bias: bool = True


FAMILY: Final = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    config=SeedOssConfig,
    tensors=llama.TENSORS | {f"{name}_bias": llama.LAYER + f"self_attn.{name}_proj.bias" for name in "qkvo"},
    # Those of transformers.
    defaults={"attention_bias": True, "attention_out_bias": False, "head_dim": 128, "num_key_value_heads": 8},
    read=lambda hf: {"qkv_bias": hf["attention_bias"], "o_bias": hf["attention_out_bias"]},
    write=lambda config: {
        "attention_bias": config.qkv_bias, "attention_out_bias": config.variant.o_bias, "residual_dropout": 0.0,
    },
)  # fmt: skip
