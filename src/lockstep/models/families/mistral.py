"""Mistral (https://arxiv.org/abs/2310.06825) to Small 3.2: a Llama whose layers may all have a sliding window."""

import dataclasses
from typing import Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, preset, windows
from lockstep.models.rope import RotaryConfig


@ModelConfig.register_subclass("mistral")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Mistral (https://arxiv.org/abs/2310.06825): a Llama whose layers may all have ``variant.sliding_window``.

    Example:
        >>> lockstep.models.MistralConfig(num_kv_heads=8, intermediate_dim=14336).q_heads_per_group
        4
    """


FAMILY: Final = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    config=MistralConfig,
    with_images=("Mistral3ForConditionalGeneration", "mistral3"),
    tensors=llama.TENSORS,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    read=lambda hf: windows(hf["sliding_window"], None),
    write=lambda config: {"sliding_window": config.variant.sliding_window},
    presets={
        "mistral-7b-v0.3": preset(
            MistralConfig, (4096, 14336, 32, 32, 8), context=32768, vocab=32768, rope=RotaryConfig(theta=1e6)
        ),
    },
)
