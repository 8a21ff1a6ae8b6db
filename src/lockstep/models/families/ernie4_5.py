"""ERNIE 4.5 without experts (https://huggingface.co/baidu/ERNIE-4.5-0.3B-PT): neighbours of a head are rotated."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, preset
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import Variant


@ModelConfig.register_subclass("ernie4_5")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ernie45Config(LlamaConfig):
    """ERNIE 4.5 without experts: a Llama that rotates neighbouring elements of a head together."""

    head_dim: int | None = 128
    tie_word_embeddings: bool = True
    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(theta=5e5))
    variant: Variant = dataclasses.field(default_factory=lambda: Variant(interleaved_rope=True))


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf["use_bias"]:
        raise ConfigError(
            "the checkpoint's config.json has use_bias: true; lockstep computes ERNIE 4.5 without biases, as it was "
            "published. Choose another checkpoint."
        )
    return {}


FAMILY: Final = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    config=Ernie45Config,
    tensors=llama.TENSORS,
    # Those of transformers.
    defaults={
        "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True,
        "use_bias": False,
    },
    read=_read,
    write=lambda config: {"use_bias": False},
    # Its config.json.
    presets={"ernie-4.5-0.3b-pt": preset(Ernie45Config, (1024, 3072, 18, 16, 2), context=131072, vocab=103424)},
)  # fmt: skip
