"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms after attention and MLP alone, and over all heads of q and k."""

import dataclasses
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family, preset
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Variant(Variant):
    """The switches of OLMo 2."""

    pre_norm: bool = False
    post_norm: bool = True
    wide_qk_norm: bool = True


@ModelConfig.register_subclass("olmo2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    """OLMo 2 (https://arxiv.org/abs/2501.00656): norms after attention and MLP alone, and over all heads of q and k."""

    qk_norm: bool = True
    layer_norm_epsilon: float = 1e-6
    variant: Olmo2Variant = dataclasses.field(default_factory=Olmo2Variant)


_NORMS: Final = {
    "attn_post_norm": llama.LAYER + "post_attention_layernorm.weight",
    "mlp_post_norm": llama.LAYER + "post_feedforward_layernorm.weight",
    **{f"{name}_wide_norm": llama.LAYER + f"self_attn.{name}_norm.weight" for name in "qk"},
}


_COMMON: Final[Any] = {"context": 4096, "vocab": 100352, "rope": RotaryConfig(theta=5e5)}
FAMILY: Final = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    config=Olmo2Config,
    tensors={name: tensor for name, tensor in llama.TENSORS.items() if name not in ("attn_norm", "mlp_norm")} | _NORMS,
    defaults={"rms_norm_eps": 1e-5},
    read=lambda hf: {"qk_norm": True},
    write=lambda config: {"attention_bias": False},
    # Table 1 of the paper; the rest is in each checkpoint's config.json.
    presets={
        "olmo-2-0425-1b": preset(Olmo2Config, (2048, 8192, 16, 16, 16), **_COMMON),
        "olmo-2-1124-7b": preset(Olmo2Config, (4096, 11008, 32, 32, 32), **_COMMON),
        "olmo-2-1124-13b": preset(Olmo2Config, (5120, 13824, 40, 40, 40), **_COMMON),
        "olmo-2-0325-32b": preset(Olmo2Config, (5120, 27648, 64, 40, 8), **_COMMON),
    },
)
