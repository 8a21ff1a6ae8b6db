"""Hunyuan (https://github.com/Tencent-Hunyuan/Hunyuan-7B): norms of queries and keys after they are rotated."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family
from lockstep.models.rope import rope_from_hf
from lockstep.models.variant import Variant


@ModelConfig.register_subclass("hunyuan_v1_dense")
@dataclasses.dataclass(frozen=True, kw_only=True)
class HunyuanConfig(LlamaConfig):
    """Hunyuan without experts: a Llama with norms of queries and keys after they are rotated."""

    qk_norm: bool = True
    variant: Variant = dataclasses.field(default_factory=lambda: Variant(norm_after_rope=True))


def read_attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of attention in a ``config.json``, where rotary settings with ``alpha`` have another base."""
    head = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    spellings = ("rope_scaling", "rope_parameters")
    settings: Mapping[str, Any] = next((hf[key] for key in spellings if hf.get(key)), {})
    alpha = settings.get("alpha")
    if not alpha or settings.get("rope_type", settings.get("type")) != "dynamic":
        return {"qk_norm": True}
    plain = {key: {**hf[key], "rope_type": "default", "type": "default"} for key in spellings if hf.get(key)}
    rope = rope_from_hf({**hf, **plain})
    return {"qk_norm": True, "rope": dataclasses.replace(rope, theta=rope.theta * alpha ** (head / (head - 2)))}


TENSORS: Final = {
    f"{short}_norm": f"{llama.LAYER}self_attn.{name}_layernorm.weight" for short, name in (("q", "query"), ("k", "key"))
}
FAMILY: Final = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    config=HunyuanConfig,
    tensors=llama.TENSORS | TENSORS,
    defaults={"rms_norm_eps": 1e-5},  # that of transformers
    read=read_attention,
    write=lambda config: {"attention_bias": False},
)
