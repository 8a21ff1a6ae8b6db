"""Ministral 3 (https://arxiv.org/abs/2601.08584) and Devstral 2: a Mistral whose later queries have a factor."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, ModelPreset, preset, windows
from lockstep.models.rope import RotaryConfig, YarnScaling, rope_from_hf, rope_to_hf

_KEY: Final = "llama_4_scaling_beta"
_YARN: Final = YarnScaling(
    factor=16.0, original_max_position_embeddings=16384, attention_factor=1.0, llama_4_scaling_beta=0.1
)


@ModelConfig.register_subclass("ministral3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ministral3Config(LlamaConfig):
    """Ministral 3 (https://arxiv.org/abs/2601.08584): YaRN, and a factor of queries that grows with their position."""

    head_dim: int | None = 128
    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(theta=1e6, yarn=_YARN))


def with_query_factor(rope: RotaryConfig, settings: Mapping[str, Any], family: str) -> RotaryConfig:
    """Rotary embeddings with the factor of later queries that the settings of a ``config.json`` have.

    Raises:
        ConfigError: They have none.
    """
    if rope.yarn is None or settings.get(_KEY) is None:
        raise ConfigError(
            f"the checkpoint's config.json has the rotary settings {settings}, of rope_scaling or rope_parameters; "
            f"lockstep computes {family} with YaRN and {_KEY}. Add what is missing, or choose another checkpoint."
        )
    yarn = dataclasses.replace(rope.yarn, llama_4_scaling_beta=settings[_KEY] or None)
    return dataclasses.replace(rope, yarn=yarn)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf = {**hf, "rope_parameters": {"rope_theta": 1e6, **(rope_to_hf(Ministral3Config().rope) or {})}}
    settings = hf.get("rope_scaling") or hf["rope_parameters"]
    rope = with_query_factor(rope_from_hf(hf), settings, "Ministral 3")
    return {"rope": rope, **windows(hf["sliding_window"], None)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    scaling = {_KEY: 0.0, **(rope_to_hf(config.rope) or {})}
    return {"sliding_window": config.variant.sliding_window, "rope_scaling": scaling}


def _preset(hidden: int, mlp: int, layers: int, *, theta: float = 1e6, tied: bool = False) -> ModelPreset:
    rope = RotaryConfig(theta=theta, yarn=_YARN)
    sizes = (hidden, mlp, layers, 32, 8)
    return preset(Ministral3Config, sizes, context=262144, vocab=131072, rope=rope, tie_word_embeddings=tied)


FAMILY: Final = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    config=Ministral3Config,
    with_images=("Mistral3ForConditionalGeneration", "mistral3"),
    tensors=llama.TENSORS,
    # Those of transformers.
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None},
    read=_read,
    write=_write,
    # Table 1 of the paper; the rest is in each checkpoint's config.json.
    presets={
        "ministral-3-3b-2512": _preset(3072, 9216, 26, tied=True),
        "ministral-3-8b-2512": _preset(4096, 14336, 34),
        "ministral-3-14b-2512": _preset(5120, 16384, 40, theta=1e9),
    },
)
