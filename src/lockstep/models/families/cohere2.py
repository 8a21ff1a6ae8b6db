"""Cohere 2 (https://arxiv.org/abs/2504.00698): attention beside the MLP, no positions in every fourth layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, layer_types_to_hf, preset, windows
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2Variant(Variant):
    """The switches of Cohere 2."""

    parallel: bool = True
    centered_norm: bool = True
    logit_scale: float | None = 0.0625
    sliding_window: int | None = 4096
    full_attention_every: int | None = 4
    interleaved_rope: bool = True
    full_rope: bool = False


@ModelConfig.register_subclass("cohere2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2Config(LlamaConfig):
    """Cohere 2 (https://arxiv.org/abs/2504.00698), Command A and R7B: attention and MLP read one norm."""

    tie_word_embeddings: bool = True
    variant: Cohere2Variant = dataclasses.field(default_factory=Cohere2Variant)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    every, layers = hf.get("sliding_window_pattern", 4), hf["num_hidden_layers"]
    return {
        "logit_scale": None if hf["logit_scale"] == 1 else float(hf["logit_scale"]),
        "qkv_bias": hf["attention_bias"],
        "o_bias": hf["attention_bias"],
        **windows(hf["sliding_window"], hf.get("layer_types"), every=every, layers=layers),
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    every = config.variant.full_attention_every
    return {
        "logit_scale": config.variant.logit_scale or 1.0,
        "attention_bias": config.qkv_bias,
        "sliding_window": config.variant.sliding_window,
        "layer_types": layer_types_to_hf(config),
        **({} if every is None else {"sliding_window_pattern": every}),
    }


_COMMON: Final[Any] = {"rope": RotaryConfig(theta=5e4), "variant": Cohere2Variant(logit_scale=0.25), "vocab": 256000}
FAMILY: Final = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    config=Cohere2Config,
    tensors={name: tensor for name, tensor in llama.TENSORS.items() if name != "mlp_norm"}
    | {f"{name}_bias": llama.LAYER + f"self_attn.{name}_proj.bias" for name in "qkvo"},
    # Those of transformers.
    defaults={
        "attention_bias": False, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
    epsilon_key="layer_norm_eps",
    # Each checkpoint's config.json.
    presets={
        "c4ai-command-r7b-12-2024": preset(Cohere2Config, (4096, 14336, 32, 32, 8), context=132096, **_COMMON),
        "c4ai-command-a-03-2025": preset(Cohere2Config, (12288, 36864, 64, 96, 8), context=131072, **_COMMON),
    },
)  # fmt: skip
