"""EXAONE 4.0 (https://arxiv.org/abs/2507.11407): norms after attention and MLP, positions where there is a window."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import olmo2, qwen3
from lockstep.models.families.family import Family, layer_types_to_hf, windows
from lockstep.models.variant import Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exaone4Variant(Variant):
    """The switches of EXAONE 4.0."""

    pre_norm: bool = False
    post_norm: bool = True
    sliding_window: int | None = 4096
    full_attention_every: int | None = 4
    full_rope: bool = False


@ModelConfig.register_subclass("exaone4")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Exaone4Config(LlamaConfig):
    """EXAONE 4.0 (https://arxiv.org/abs/2507.11407): norms behind attention and MLP, and of queries and keys."""

    qk_norm: bool = True
    variant: Exaone4Variant = dataclasses.field(default_factory=Exaone4Variant)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    window, types, every = hf["sliding_window"], hf.get("layer_types"), hf["sliding_window_pattern"]
    regular = isinstance(every, int) and every > 1
    if window is not None and types is None and not regular:
        raise ConfigError(
            f"the checkpoint's config.json has sliding_window {window}, sliding_window_pattern {every!r} and no "
            "layer_types, with which transformers fails. Add layer_types, or make sliding_window_pattern a number "
            "above 1."
        )
    fields = windows(window, types, every=every if regular else 4, layers=hf["num_hidden_layers"])
    return {"qk_norm": True, "full_rope": window is None, **fields}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        "sliding_window": config.variant.sliding_window,
        "sliding_window_pattern": config.variant.full_attention_every,
        "layer_types": layer_types_to_hf(config),
    }


FAMILY: Final = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    config=Exaone4Config,
    tensors={name: tensor for name, tensor in qwen3.FAMILY.tensors.items() if name not in ("attn_norm", "mlp_norm")}
    | {name: tensor for name, tensor in olmo2.FAMILY.tensors.items() if name.endswith("post_norm")},
    # Those of transformers.
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    read=_read,
    write=_write,
)
