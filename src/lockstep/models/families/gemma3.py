"""Gemma 3 (https://arxiv.org/abs/2503.19786), its language model: a window and another rotary base in most layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import gemma2, llama
from lockstep.models.families.family import Family, preset
from lockstep.models.rope import RotaryConfig, required, rope_from_hf, rope_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Variant(gemma2.PostNormVariant):
    """The switches of Gemma 3."""

    sliding_window: int | None = 1024
    full_attention_every: int | None = 6
    sliding_rope: RotaryConfig | None = dataclasses.field(default_factory=RotaryConfig)


@ModelConfig.register_subclass("gemma3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(LlamaConfig):
    """Gemma 3 (https://arxiv.org/abs/2503.19786), its language model: windows, two rotary bases, norms of q and k."""

    head_dim: int | None = 256
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = dataclasses.field(default_factory=lambda: RotaryConfig(theta=1e6))
    qk_norm: bool = True
    variant: Gemma3Variant = dataclasses.field(default_factory=Gemma3Variant)


def ropes_from_hf(hf: Mapping[str, Any], *, slides: bool, local_theta: str) -> dict[str, RotaryConfig | None]:
    """The rotary embeddings of layers with full attention, and of those with a window where there are any.

    Args:
        local_theta: The key of the base of the latter in files without ``rope_parameters``.
    """
    kinds, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    full, sliding = kinds.get("full_attention") or {}, kinds.get("sliding_attention") or {}
    # transformers itself adds these two where all layers are of one kind.
    unread = kinds.keys() - ({"full_attention", "sliding_attention"} | ({"rope_theta", "rope_type"} if full else set()))
    if "type" in scaling and "rope_type" not in scaling:
        unread |= {"type"}
    if unread:
        raise ConfigError(
            f"the checkpoint's config.json has {', '.join(sorted(unread))} in rope_parameters or rope_scaling, which "
            f"transformers does not read there for {hf['model_type']}. Put rope_theta, rope_type and the others into "
            "full_attention and sliding_attention of rope_parameters."
        )
    common = {key: value for key, value in hf.items() if key in ("max_position_embeddings", "partial_rotary_factor")}
    # As in transformers 5, what rope_scaling does not say is as rope_parameters says.
    globally = {
        "rope_theta": hf["rope_theta"],
        "rope_parameters": full,
        "rope_scaling": {**full, **scaling} if scaling else None,
    }
    locally = {} if "rope_theta" in sliding else {"rope_theta": required(hf, local_theta)}
    return {
        "rope": rope_from_hf(common | globally),
        "sliding_rope": rope_from_hf(common | locally | {"rope_parameters": sliding}) if slides else None,
    }


def ropes_to_hf(config: LlamaConfig) -> dict[str, dict[str, Any]]:
    """The ``rope_parameters`` of a ``config.json``, which transformers 5 reads; 4 scales no layers with a window."""
    ropes = {"full_attention": config.rope, "sliding_attention": config.variant.sliding_rope or config.rope}
    return {
        name: {"rope_type": "default", **(rope_to_hf(rope) or {}), "rope_theta": rope.theta}
        for name, rope in ropes.items()
    }


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    fields = gemma2.read(hf, every=hf.get("sliding_window_pattern", 6))
    slides = fields["sliding_window"] is not None
    return {"qk_norm": True, **fields, **ropes_from_hf(hf, slides=slides, local_theta="rope_local_base_freq")}


def _write(config: LlamaConfig) -> dict[str, Any]:
    every, local = config.variant.full_attention_every, config.variant.sliding_rope or config.rope
    return {
        **gemma2.write(config),
        **({} if every is None else {"sliding_window_pattern": every}),
        "rope_local_base_freq": local.theta,
        "rope_parameters": ropes_to_hf(config),
    }


_LARGE: Final[Any] = {
    "context": 131072,
    "vocab": 262208,
    "rope": RotaryConfig(theta=1e6, linear_factor=8.0),
}

FAMILY: Final = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    with_images=("Gemma3ForConditionalGeneration", "gemma3"),
    config=Gemma3Config,
    tensors=gemma2.TENSORS | {f"{name}_norm": llama.LAYER + f"self_attn.{name}_norm.weight" for name in "qk"},
    # Those of transformers: the text_config of the published 4B, 12B and 27B leaves most out.
    defaults={
        **gemma2.DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_attention_heads": 8,
        "max_position_embeddings": 131072, "vocab_size": 262208,
    },
    read=_read,
    write=_write,
    activation_key="hidden_activation",
    # Table 1 of the paper; the rest is in each checkpoint's config.json.
    presets={
        "gemma-3-1b": preset(
            Gemma3Config, (1152, 6912, 26, 4, 1), context=32768, vocab=262144,
            variant=Gemma3Variant(sliding_window=512),
        ),
        "gemma-3-4b": preset(Gemma3Config, (2560, 10240, 34, 8, 4), **_LARGE),
        "gemma-3-12b": preset(Gemma3Config, (3840, 15360, 48, 16, 8), **_LARGE),
        "gemma-3-27b": preset(
            Gemma3Config, (5376, 21504, 62, 32, 16), head_dim=128, variant=Gemma3Variant(attention_scale=168**-0.5),
            **_LARGE,
        ),
    },
)  # fmt: skip
