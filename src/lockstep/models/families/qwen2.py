"""Qwen2 (https://arxiv.org/abs/2407.10671) and Qwen2.5: a Llama with biases on query, key and value."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, ModelPreset, layer_types_to_hf, preset, windows
from lockstep.models.rope import RotaryConfig


@ModelConfig.register_subclass("qwen2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Qwen2 (https://arxiv.org/abs/2407.10671) and Qwen2.5: a Llama with biases on query, key and value.

    Example:
        >>> lockstep.models.Qwen2Config().qkv_bias
        True
    """

    qkv_bias: bool = True
    layer_norm_epsilon: float = 1e-6


def read_windows(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The windows of Qwen2 and Qwen3: where they are used at all, the first ``max_window_layers`` have none."""
    layers, full = hf["num_hidden_layers"], hf["max_window_layers"]
    types = [("full" if layer < full else "sliding") + "_attention" for layer in range(layers)]
    return windows(hf["sliding_window"] if hf["use_sliding_window"] else None, hf.get("layer_types") or types)


def write_windows(config: LlamaConfig) -> dict[str, Any]:
    """The keys of ``config.json`` that `read_windows` reads."""
    if config.variant.sliding_window is None:
        return {"use_sliding_window": False}
    types = layer_types_to_hf(config)
    return {
        "use_sliding_window": True,
        "sliding_window": config.variant.sliding_window,
        "max_window_layers": types.index("sliding_attention"),
        "layer_types": types,
    }


WINDOW_DEFAULTS: Final = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def _preset(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool, vocab: int) -> ModelPreset:
    rope, sizes = RotaryConfig(theta=1e6), (hidden, mlp, layers, heads, kv_heads)
    return preset(Qwen2Config, sizes, context=32768, vocab=vocab, tie_word_embeddings=tied, rope=rope)


FAMILY: Final = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    config=Qwen2Config,
    tensors=llama.TENSORS | {f"{name}_bias": llama.LAYER + f"self_attn.{name}_proj.bias" for name in "qkv"},
    defaults={"num_key_value_heads": 32, **WINDOW_DEFAULTS},
    read=lambda hf: {"qkv_bias": True, **read_windows(hf)},
    write=write_windows,
    # https://arxiv.org/abs/2412.15115, table 1; the rest is in each checkpoint's config.json.
    presets={
        "qwen2.5-0.5b": _preset(896, 4864, 24, 14, 2, tied=True, vocab=151936),
        "qwen2.5-1.5b": _preset(1536, 8960, 28, 12, 2, tied=True, vocab=151936),
        "qwen2.5-3b": _preset(2048, 11008, 36, 16, 2, tied=True, vocab=151936),
        "qwen2.5-7b": _preset(3584, 18944, 28, 28, 4, tied=False, vocab=152064),
    },
)
