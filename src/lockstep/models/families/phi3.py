"""Phi-3 (https://arxiv.org/abs/2404.14219) and Phi-4 (https://arxiv.org/abs/2412.08905): a Llama with fused tensors."""

import dataclasses
from typing import Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, preset, windows
from lockstep.models.rope import RotaryConfig


@ModelConfig.register_subclass("phi3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """Phi-3 and Phi-4 (https://arxiv.org/abs/2412.08905): a Llama that may have a window and rotate parts of heads."""


FAMILY: Final = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    config=Phi3Config,
    tensors=llama.TENSORS
    | dict.fromkeys(("q", "k", "v"), llama.LAYER + "self_attn.qkv_proj.weight")
    | dict.fromkeys(("gate", "up"), llama.LAYER + "mlp.gate_up_proj.weight"),
    defaults={"partial_rotary_factor": None, "sliding_window": None, "rms_norm_eps": 1e-5},
    read=lambda hf: windows(hf["sliding_window"], None),
    write=lambda config: {"sliding_window": config.variant.sliding_window, "attention_bias": False},
    # The paper, section 3; the rest is in the checkpoint's config.json.
    presets={
        "phi-4": preset(
            Phi3Config, (5120, 17920, 40, 40, 10), context=16384, vocab=100352, rope=RotaryConfig(theta=250000.0)
        ),
    },
)
