"""Gemma 2 (https://arxiv.org/abs/2408.00118): soft caps, norms on both sides, a window in every other layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import gemma, llama
from lockstep.models.families.family import Family, ModelPreset, layer_types_to_hf, preset, windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostNormVariant(gemma.GemmaVariant):
    """The switches that Gemma 2 and 3 have in common."""

    post_norm: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Variant(PostNormVariant):
    """The switches of Gemma 2."""

    attention_soft_cap: float | None = 50.0
    logit_soft_cap: float | None = 30.0
    sliding_window: int | None = 4096
    full_attention_every: int | None = 2


@ModelConfig.register_subclass("gemma2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(LlamaConfig):
    """Gemma 2 (https://arxiv.org/abs/2408.00118): soft caps, norms on both sides, a window in every other layer."""

    head_dim: int | None = 256
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    variant: Gemma2Variant = dataclasses.field(default_factory=Gemma2Variant)


TENSORS: Final = llama.TENSORS | {
    "attn_post_norm": llama.LAYER + "post_attention_layernorm.weight",
    "mlp_norm": llama.LAYER + "pre_feedforward_layernorm.weight",
    "mlp_post_norm": llama.LAYER + "post_feedforward_layernorm.weight",
}

DEFAULTS: Final = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def read(hf: Mapping[str, Any], every: int) -> dict[str, Any]:
    """The fields of Gemma 2 and 3, given every how many layers one has full attention."""
    scalar = hf["query_pre_attn_scalar"]
    types = hf.get("layer_types")
    return {
        "attention_scale": None if scalar == hf["head_dim"] else scalar**-0.5,
        "attention_soft_cap": hf["attn_logit_softcapping"],
        "logit_soft_cap": hf["final_logit_softcapping"],
        **windows(hf["sliding_window"], types, every=every, layers=hf["num_hidden_layers"]),
    }


def write(config: LlamaConfig) -> dict[str, Any]:
    """The keys of ``config.json`` that `read` reads."""
    scale = config.variant.attention_scale
    scalar = config.head_size if scale is None else scale**-2
    return {
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.variant.attention_soft_cap,
        "final_logit_softcapping": config.variant.logit_soft_cap,
        "sliding_window": config.variant.sliding_window,
        "layer_types": layer_types_to_hf(config),
        "attention_bias": False,
    }


def _preset(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, head: int, scalar: int) -> ModelPreset:
    variant = Gemma2Variant(attention_scale=None if scalar == head else scalar**-0.5)
    sizes = (hidden, mlp, layers, heads, kv_heads)
    return preset(Gemma2Config, sizes, context=8192, vocab=256000, head_dim=head, variant=variant)


FAMILY: Final = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    config=Gemma2Config,
    tensors=TENSORS,
    defaults=DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    read=lambda hf: read(hf, every=2),
    write=write,
    activation_key="hidden_activation",
    # Table 1 of the paper; the rest is in each checkpoint's config.json.
    presets={
        "gemma-2-2b": _preset(2304, 9216, 26, 8, 4, head=256, scalar=256),
        "gemma-2-9b": _preset(3584, 14336, 42, 16, 8, head=256, scalar=256),
        "gemma-2-27b": _preset(4608, 36864, 46, 32, 16, head=128, scalar=144),
    },
)
