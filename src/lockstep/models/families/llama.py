"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783), and the names of tensors that most families share with it."""

from typing import Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families.family import Family, ModelPreset, preset
from lockstep.models.rope import Llama3Scaling, RotaryConfig

ModelConfig.register_subclass("llama", LlamaConfig)

LAYER: Final = "model.layers.{layer}."
ATTENTION_TENSORS: Final = {
    "embed": "model.embed_tokens.weight",
    "attn_norm": LAYER + "input_layernorm.weight",
    "q": LAYER + "self_attn.q_proj.weight",
    "k": LAYER + "self_attn.k_proj.weight",
    "v": LAYER + "self_attn.v_proj.weight",
    "o": LAYER + "self_attn.o_proj.weight",
    "mlp_norm": LAYER + "post_attention_layernorm.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
"""The tensors of all but the MLP."""
TENSORS: Final = ATTENTION_TENSORS | {name: LAYER + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def _preset(hidden: int, mlp: int, layers: int, heads: int, *, context: int, factor: float | None,
            tied: bool = False) -> ModelPreset:  # fmt: skip
    scaling = None if factor is None else Llama3Scaling(factor=factor)
    rope, sizes = RotaryConfig(theta=5e5, scaling=scaling), (hidden, mlp, layers, heads, 8)
    return preset(LlamaConfig, sizes, context=context, vocab=128256, tie_word_embeddings=tied, rope=rope)


FAMILY: Final = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    config=LlamaConfig,
    tensors=TENSORS,
    write=lambda config: {"attention_bias": False},
    # Table 3 of the paper, and the models' cards; the rest is in each checkpoint's config.json.
    presets={
        "llama-3-8b": _preset(4096, 14336, 32, 32, context=8192, factor=None),
        "llama-3-70b": _preset(8192, 28672, 80, 64, context=8192, factor=None),
        "llama-3.1-8b": _preset(4096, 14336, 32, 32, context=131072, factor=8),
        "llama-3.1-70b": _preset(8192, 28672, 80, 64, context=131072, factor=8),
        "llama-3.1-405b": _preset(16384, 53248, 126, 128, context=131072, factor=8),
        "llama-3.2-1b": _preset(2048, 8192, 16, 32, context=131072, factor=32, tied=True),
        "llama-3.2-3b": _preset(3072, 8192, 28, 24, context=131072, factor=32, tied=True),
        "llama-3.3-70b": _preset(8192, 28672, 80, 64, context=131072, factor=8),
    },
)
