"""Qwen3 (https://arxiv.org/abs/2505.09388): a Llama with an RMSNorm on each query and key head."""

import dataclasses
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, preset
from lockstep.models.families.qwen2 import WINDOW_DEFAULTS, read_windows, write_windows
from lockstep.models.rope import RotaryConfig


@ModelConfig.register_subclass("qwen3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Qwen3 (https://arxiv.org/abs/2505.09388): a Llama with an RMSNorm on each query and key head.

    Example:
        >>> lockstep.models.Qwen3Config(head_dim=128).qk_norm
        True
    """

    qk_norm: bool = True
    layer_norm_epsilon: float = 1e-6


COMMON: Final[Any] = {"context": 40960, "vocab": 151936, "rope": RotaryConfig(theta=1e6)}
"""The values that all checkpoints of Qwen3 have."""

FAMILY: Final = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    config=Qwen3Config,
    tensors=llama.TENSORS | {f"{name}_norm": llama.LAYER + f"self_attn.{name}_norm.weight" for name in "qk"},
    defaults={"head_dim": 128, "num_key_value_heads": 32, **WINDOW_DEFAULTS},
    read=lambda hf: {"qk_norm": True, **read_windows(hf)},
    write=lambda config: {"attention_bias": False, **write_windows(config)},
    # Table 1 of the paper; the rest is in the checkpoint's config.json.
    presets={
        "qwen3-8b": preset(Qwen3Config, (4096, 12288, 36, 32, 8), **COMMON),
        "qwen3-32b": preset(Qwen3Config, (5120, 25600, 64, 64, 8), head_dim=128, **COMMON),
    },
)
