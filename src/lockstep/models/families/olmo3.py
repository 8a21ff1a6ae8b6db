"""OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with a window in three of four layers, which YaRN leaves alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import gemma3, olmo2
from lockstep.models.families.family import Family, layer_types_to_hf, preset, windows
from lockstep.models.rope import RotaryConfig, YarnScaling

_THETA: Final = 5e5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Variant(olmo2.Olmo2Variant):
    """The switches of OLMo 3."""

    sliding_window: int | None = 4096
    full_attention_every: int | None = 4
    sliding_rope: RotaryConfig | None = dataclasses.field(default_factory=lambda: RotaryConfig(theta=_THETA))


@ModelConfig.register_subclass("olmo3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(LlamaConfig):
    """OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with windows, and rotary embeddings of either kind of layer."""

    qk_norm: bool = True
    layer_norm_epsilon: float = 1e-6
    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(theta=_THETA))
    variant: Olmo3Variant = dataclasses.field(default_factory=Olmo3Variant)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    fields = windows(hf["sliding_window"], hf.get("layer_types"), every=4, layers=hf["num_hidden_layers"])
    slides = fields["sliding_window"] is not None
    local = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    if slides and "rope_theta" not in local and hf["rope_theta"] not in (None, _THETA):
        raise ConfigError(
            f"the checkpoint's config.json has rope_theta {hf['rope_theta']} and none in sliding_attention of "
            f"rope_parameters: in layers with a window transformers 5 takes {_THETA:g}, and 4 the same as in others. "
            "Put rope_theta into full_attention and sliding_attention of rope_parameters."
        )
    return {"qk_norm": True, **fields, **gemma3.ropes_from_hf(hf, slides=slides, local_theta="rope_theta")}


def _write(config: LlamaConfig) -> dict[str, Any]:
    fields = {
        "sliding_window": config.variant.sliding_window,
        "layer_types": layer_types_to_hf(config),
        "attention_bias": False,
    }
    sliding = config.variant.sliding_rope
    if sliding is None or (sliding, config.rope.theta) == (RotaryConfig(theta=_THETA), _THETA):
        return fields  # rope_theta and rope_scaling say it, to every transformers that has the family
    return fields | {"rope_parameters": gemma3.ropes_to_hf(config), "rope_scaling": None}


_COMMON: Final[Any] = {
    "context": 65536,
    "vocab": 100278,
    "rope": RotaryConfig(theta=_THETA, yarn=YarnScaling(factor=8.0, original_max_position_embeddings=8192)),
}
_SMALL: Final = preset(Olmo3Config, (4096, 11008, 32, 32, 32), **_COMMON)
_LARGE: Final = preset(Olmo3Config, (5120, 27648, 64, 40, 8), **_COMMON)
FAMILY: Final = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    config=Olmo3Config,
    tensors=olmo2.FAMILY.tensors,
    # Those of transformers, whose versions differ in the base.
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": None},
    read=_read,
    write=_write,
    # Table 1 of the paper; the rest is in each checkpoint's config.json.
    presets={
        **dict.fromkeys(("olmo-3-1025-7b", "olmo-3-7b", "olmo-3-7b-think"), _SMALL),
        **dict.fromkeys(("olmo-3-1125-32b", "olmo-3-32b-think", "olmo-3.1-32b", "olmo-3.1-32b-think"), _LARGE),
    },
)
