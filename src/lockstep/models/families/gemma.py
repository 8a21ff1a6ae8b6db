"""Gemma (https://arxiv.org/abs/2403.08295): GELU, norms of 1 + weight, a scaled embedding that is the output layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import ACTIVATIONS, Family, preset
from lockstep.models.variant import Activation, Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaVariant(Variant):
    """The switches that all Gemmas have in common."""

    activation: Activation = "gelu_tanh"
    norm_plus_one: bool = True
    embed_scale: float | Literal["sqrt_hidden_dim"] | None = "sqrt_hidden_dim"


@ModelConfig.register_subclass("gemma")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    """Gemma (https://arxiv.org/abs/2403.08295), CodeGemma and their like, before Gemma 2."""

    head_dim: int | None = 256
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    variant: GemmaVariant = dataclasses.field(default_factory=GemmaVariant)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    activation = hf.get("hidden_activation") or hf["hidden_act"]  # as transformers 4, which published it
    if activation == "gelu" or activation not in ACTIVATIONS:
        raise ConfigError(
            f"the checkpoint's config.json has hidden_act {hf['hidden_act']!r} and hidden_activation "
            f"{hf.get('hidden_activation')!r}; Gemma was trained with gelu_pytorch_tanh, which transformers 4 computes "
            "for 'gelu' too, and 5 does not. Write gelu_pytorch_tanh for both."
        )
    return {"activation": ACTIVATIONS[activation]}


FAMILY: Final = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    config=GemmaConfig,
    tensors=llama.TENSORS,
    defaults={
        "head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
    },
    read=_read,
    write=lambda config: {"attention_bias": False},
    # Table 1 of the paper; the rest is in each checkpoint's config.json.
    presets={
        "gemma-2b": preset(GemmaConfig, (2048, 16384, 18, 8, 1), context=8192, vocab=256000),
        "gemma-7b": preset(GemmaConfig, (3072, 24576, 28, 16, 16), context=8192, vocab=256000),
    },
)  # fmt: skip
