"""Qwen3.5, its language model: Qwen3-Next's attention, whose projections are stored part by part, and an MLP."""

import dataclasses
from typing import Any, Final

from lockstep.models.config import ModelConfig
from lockstep.models.delta_rule import LinearAttention
from lockstep.models.experts import Experts
from lockstep.models.families import llama
from lockstep.models.families.family import Family, preset
from lockstep.models.families.qwen3_next import (
    DEFAULTS,
    GATED_TENSORS,
    LINEAR,
    STATE_TENSORS,
    Qwen3NextConfig,
    Qwen3NextVariant,
    read_linear,
    write_linear,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Variant(Qwen3NextVariant):
    """The switches of Qwen3.5."""

    split_delta: bool = True


@ModelConfig.register_subclass("qwen3_5")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Config(Qwen3NextConfig):
    """Qwen3.5 (https://huggingface.co/Qwen/Qwen3.5-27B), its language model: linear attention in most layers."""

    variant: Qwen35Variant = dataclasses.field(default_factory=Qwen35Variant)
    experts: Experts | None = None


TENSORS: Final = (
    GATED_TENSORS
    | {f"linear_{name}": LINEAR + "in_proj_qkv.weight" for name in "qkv"}
    | {f"linear_{name}": LINEAR + f"in_proj_{name}.weight" for name in "zba"}
    | STATE_TENSORS
)
"""The tensors of all but MLP and experts."""


COMMON: Final[Any] = {"context": 262144, "vocab": 248320}
"""The values that all checkpoints of Qwen3.5 have."""
FAMILY: Final = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    with_images=("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    config=Qwen35Config,
    tensors=TENSORS | {name: llama.LAYER + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    read=lambda hf: {**read_linear(hf), "experts": None},
    write=write_linear,
    # The config.json of each checkpoint, as others quote it.
    presets={
        "qwen3.5-9b": preset(Qwen35Config, (4096, 12288, 32, 16, 4), **COMMON),
        "qwen3.5-27b": preset(
            Qwen35Config, (5120, 17408, 64, 24, 4), linear_attention=LinearAttention(value_heads=48), **COMMON
        ),
    },
)
