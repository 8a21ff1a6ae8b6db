"""DeepSeek V3 (https://arxiv.org/abs/2412.19437): attention with a latent, and experts in groups."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import glm4_moe, llama
from lockstep.models.families.family import Family, preset
from lockstep.models.latent import Latent
from lockstep.models.rope import RotaryConfig, YarnScaling, required, rope_from_hf, rope_to_hf
from lockstep.models.variant import Variant

_NOT_LATENT: Final = (
    "attention_sinks", "unit_qk_norm", "exclusive_attention", "head_gates", "o_bias", "wide_qk_norm",
    "gated_attention",
)  # fmt: skip
"""Fields of a variant that attention with a latent does not have."""


@ModelConfig.register_subclass("deepseek_v3")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(LlamaConfig):
    """DeepSeek V3 (https://arxiv.org/abs/2412.19437): attention with a latent, and experts in groups."""

    variant: Variant = dataclasses.field(default_factory=lambda: Variant(interleaved_rope=True))
    latent: Latent = Latent()
    """The latent that keys and values of all heads are made of, which sets the sizes of heads."""
    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(
            num_experts=256, num_experts_per_tok=8, intermediate_dim=2048, mlp_only_layers=(0, 1, 2),
            shared_intermediate_dim=2048, scoring="biased_sigmoid", groups=8, groups_per_tok=4,
            routed_scaling_factor=2.5, load_balancing_coef=0.0,
        )
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads != self.num_heads or self.head_dim not in (None, self.head_size):
            raise ConfigError(
                f"latent makes a key of {self.head_size} elements for each of num_heads {self.num_heads}; "
                f"num_kv_heads is {self.num_kv_heads} and head_dim {self.head_dim}. Set num_kv_heads to num_heads, and "
                "head_dim to null."
            )
        plain = Variant()
        departures = [name for name in ("qkv_bias", "qk_norm") if getattr(self, name)]
        departures += [f"variant.{name}" for name in _NOT_LATENT if getattr(self.variant, name) != getattr(plain, name)]
        if departures:
            raise ConfigError(
                f"{departures[0]} is set, which attention with a latent does not have. Set it to its default."
            )

    @property
    def head_size(self) -> int:
        return self.latent.head_size

    @property
    def rotary_size(self) -> int:
        return self.latent.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        return self.latent.v_head_dim

    @property
    def kept_kv_heads(self) -> int:
        return 1  # the latent


_SIZES: Final = [field.name for field in dataclasses.fields(Latent)]


def read_latent(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of attention with a latent."""
    heads = required(hf, "num_attention_heads")
    if (hf.get("num_key_value_heads") or heads) != heads:
        raise ConfigError(
            f"the checkpoint has num_key_value_heads {hf['num_key_value_heads']} and num_attention_heads {heads}; "
            "a latent makes a key for each head. Correct num_key_value_heads."
        )
    return {
        "head_dim": None,
        "num_kv_heads": heads,
        "latent": Latent(**{name: hf[name] if name == "q_lora_rank" else required(hf, name) for name in _SIZES}),
        "rope": _rope_from_hf(hf),
    }


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    experts = glm4_moe.experts_from_hf(hf)
    return {**read_latent(hf), "experts": experts, "interleaved_rope": hf["rope_interleave"]}


def _rope_from_hf(hf: Mapping[str, Any]) -> RotaryConfig:
    """The rotary embeddings, of which YaRN multiplies scores as a whole, not rotated queries and keys."""
    rope = rope_from_hf(hf)
    if rope.yarn is None:
        return rope
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    scale = parameters.get("mscale_all_dim")
    if not scale or not math.isclose(rope.yarn.amplitude, 1.0, rel_tol=1e-6):
        raise ConfigError(
            f"the checkpoint has rope_scaling (yarn) with mscale {parameters.get('mscale')} and mscale_all_dim "
            f"{scale}; lockstep computes attention with a latent where the two are equal and not 0, so that scores are "
            "multiplied as a whole. Choose another checkpoint."
        )
    factor = None if scale == 1 else 0.1 * scale * math.log(rope.yarn.factor) + 1.0
    return dataclasses.replace(rope, yarn=dataclasses.replace(rope.yarn, attention_factor=factor))


def _rope_to_hf(yarn: YarnScaling, rope: RotaryConfig) -> dict[str, Any]:
    stated = {key: value for key, value in (rope_to_hf(rope) or {}).items() if key != "attention_factor"}
    scale = round((yarn.amplitude - 1.0) / (0.1 * math.log(yarn.factor)), 12)
    return stated | {"mscale": scale, "mscale_all_dim": scale}


def write_latent(config: LlamaConfig) -> dict[str, Any]:
    """The keys of ``config.json`` that `read_latent` reads."""
    latent, yarn = config.latent or Latent(), config.rope.yarn
    return {
        **dataclasses.asdict(latent),
        "head_dim": latent.qk_rope_head_dim,
        **({} if yarn is None else {"rope_scaling": _rope_to_hf(yarn, config.rope)}),
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    experts = glm4_moe.experts_to_hf(config, "deepseek_v3")
    return {**experts, **write_latent(config), "rope_interleave": config.variant.interleaved_rope}


_ATTENTION: Final = llama.LAYER + "self_attn."
_V3: Final = preset(
    DeepseekV3Config, (7168, 18432, 61, 128, 128), context=163840, vocab=129280, layer_norm_epsilon=1e-6,
    rope=RotaryConfig(yarn=YarnScaling(factor=40.0)),
)  # fmt: skip

LATENT_TENSORS: Final = {name: tensor for name, tensor in llama.TENSORS.items() if name not in ("k", "v")} | {
    "q_a": _ATTENTION + "q_a_proj.weight",
    "q_a_norm": _ATTENTION + "q_a_layernorm.weight",
    "q_b": _ATTENTION + "q_b_proj.weight",
    "kv_a": _ATTENTION + "kv_a_proj_with_mqa.weight",
    "kv_a_norm": _ATTENTION + "kv_a_layernorm.weight",
    "kv_b": _ATTENTION + "kv_b_proj.weight",
}
"""The tensors of all but experts."""

FAMILY: Final = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    config=DeepseekV3Config,
    tensors=LATENT_TENSORS | glm4_moe.BIASED_EXPERTS,
    # Those of transformers.
    defaults={
        **dataclasses.asdict(Latent()), "rope_interleave": True, "num_key_value_heads": 128,
        "first_k_dense_replace": 3, "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    read=_read,
    write=_write,
    # Section 4.2 of the paper; the rest is in each checkpoint's config.json.
    presets={"deepseek-v3": _V3, "deepseek-r1": _V3},
)  # fmt: skip
