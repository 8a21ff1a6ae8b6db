"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): a Llama with four factors."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family


@ModelConfig.register_subclass("granite")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Granite 3: a Llama with factors of the embedding, attention scores, what layers add, and logits (``variant``)."""

    layer_norm_epsilon: float = 1e-6


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    head = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    scale = float(hf["attention_multiplier"])
    factors = {
        "embed_scale": float(hf["embedding_multiplier"]),
        "residual_scale": float(hf["residual_multiplier"]),
        "logit_scale": 1.0 / hf["logits_scaling"],
    }
    return {
        "attention_scale": None if scale == head**-0.5 else scale,
        **{name: None if factor == 1 else factor for name, factor in factors.items()},
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    variant = config.variant
    return {
        "embedding_multiplier": config.embed_scale or 1.0,
        "attention_multiplier": variant.attention_scale or config.head_size**-0.5,
        "residual_multiplier": variant.residual_scale or 1.0,
        "logits_scaling": round(1.0 / (variant.logit_scale or 1.0), 12),
        "attention_bias": False,
    }


_FACTORS: Final = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
FAMILY: Final = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    config=GraniteConfig,
    tensors=llama.TENSORS,
    defaults=dict.fromkeys(_FACTORS, 1.0),  # those of transformers
    read=_read,
    write=_write,
)
