"""SmolLM3 (https://huggingface.co/blog/smollm3): a Llama of which every fourth layer has no positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, preset
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLm3Variant(Variant):
    """The switches of SmolLM3."""

    no_rope_every: int | None = 4


@ModelConfig.register_subclass("smollm3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLm3Config(LlamaConfig):
    """SmolLM3 (https://huggingface.co/blog/smollm3): a Llama of which every fourth layer has no positions."""

    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    variant: SmolLm3Variant = dataclasses.field(default_factory=SmolLm3Variant)


def _rotated(layers: int, every: int | None) -> list[int]:
    return [int(every is None or (layer + 1) % every > 0) for layer in range(layers)]


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
    if hf["use_sliding_window"]:
        raise ConfigError(
            "the checkpoint's config.json has use_sliding_window: true; lockstep computes SmolLM3 without windows, as "
            "it was published. Choose another checkpoint."
        )
    rotated = list(hf.get("no_rope_layers") or _rotated(layers, every))[:layers]
    every = None if all(rotated) else rotated.index(0) + 1
    if rotated != _rotated(layers, every):
        raise ConfigError(
            f"the checkpoint's config.json has no_rope_layers {rotated}; lockstep computes SmolLM3 with a 0 in every "
            "n-th layer. Choose another checkpoint."
        )
    return {"no_rope_every": every}


def _write(config: LlamaConfig) -> dict[str, Any]:
    every = config.variant.no_rope_every
    return {
        "no_rope_layers": _rotated(config.num_layers, every),
        "no_rope_layer_interval": every or config.num_layers + 1,
        "use_sliding_window": False,
        "attention_bias": False,
    }


_3B: Final = preset(SmolLm3Config, (2048, 11008, 36, 16, 4), context=65536, vocab=128256, rope=RotaryConfig(theta=5e6))
FAMILY: Final = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    config=SmolLm3Config,
    tensors=llama.TENSORS,
    # Those of transformers.
    defaults={
        "num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4, "use_sliding_window": False,
        "rope_theta": 2e6,
    },
    read=_read,
    write=_write,
    presets={"smollm3-3b": _3B},  # its config.json
)  # fmt: skip
