"""Reads Tunix's language models (Flax NNX) by the names of their parameters, with the adapters of qwix merged."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import qwix
from tunix.generate.mappings import BackendMappingMixin
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from lockstep.models.config import LlamaConfig
from lockstep.models.experts import Experts
from lockstep.models.from_names import Entry, LoraNames, from_names
from lockstep.models.registry import UnreadableModelError, named_parameters, register_reader, registered_classes
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import Variant
from lockstep.models.weights import DecoderWeights

PAGE = "docs/tunix.md"
MAX_SEQ_LEN = 2**20
"""Tunix's models have no longest sequence: rotary embeddings go on, and nothing else depends on the position."""

type Table = Mapping[str, Entry]

MLP: Table = {name: f"layers.{{}}.mlp.{name}_proj.kernel" for name in ("gate", "up", "down")}
DENSE: Table = {
    **MLP,
    "embed": "embedder.input_embedding",
    "final_norm": "final_norm.w",
    "attn_norm": "layers.{}.input_layernorm.w",
    "mlp_norm": "layers.{}.post_attention_layernorm.w",
    **{name: (f"layers.{{}}.attn.{name}_proj.w", "embed heads head -> embed heads head") for name in ("q", "k", "v")},
    "o": ("layers.{}.attn.o_proj.w", "heads head embed -> heads head embed"),
}
EXPERTS: Table = {name: entry for name, entry in DENSE.items() if name not in MLP} | {
    "router": "layers.{}.mlp.router.kernel",
    **{f"expert_{name}": f"layers.{{}}.mlp.{name}_proj" for name in MLP},
}
LM_HEAD: Table = {"lm_head": "lm_head.w"}
BIASES: Table = {f"{name}_bias": f"layers.{{}}.attn.{name}_bias" for name in "qkv"}
QK_NORMS: Table = {f"{name}_norm": f"layers.{{}}.attn.{name}_norm.w" for name in "qk"}

GEMMA: Table = {
    **MLP,
    "embed": "embedder.input_embedding",
    "final_norm": "final_norm.scale",
    "attn_norm": "layers.{}.pre_attention_norm.scale",
    "mlp_norm": "layers.{}.pre_ffw_norm.scale",
    "attn_post_norm": "layers.{}.post_attn_norm.scale",
    "mlp_post_norm": "layers.{}.post_ffw_norm.scale",
    "o": ("layers.{}.attn.attn_vec_einsum.w", "heads head embed -> heads head embed"),
}
ONE, SEVERAL = ("heads embed head -> embed heads head", "which heads embed head -> embed heads head")
GEMMA_QKV: Table = {
    name: ("layers.{}.attn.qkv_einsum.w", SEVERAL, {"which": number}) for number, name in enumerate("qkv")
}
GEMMA_Q_KV: Table = {
    "q": ("layers.{}.attn.q_einsum.w", ONE),
    **{name: ("layers.{}.attn.kv_einsum.w", SEVERAL, {"which": number}) for number, name in enumerate("kv")},
}
GEMMA3: Table = {
    **GEMMA,
    "attn_post_norm": "layers.{}.post_attention_norm.scale",
    "q_norm": "layers.{}.attn._query_norm.scale",
    "k_norm": "layers.{}.attn._key_norm.scale",
}


@register_reader(BackendMappingMixin)
def _refuse(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    readable = {cls.__name__ for cls in registered_classes() if cls.__module__.startswith("tunix.models.")}
    raise UnreadableModelError(
        f"Tunix's {type(model).__name__} cannot be read: the decoder does not compute it. Supported are "
        f"{', '.join(sorted(readable))} and their subclasses. Train one of these, or register a reader for the class "
        f"with lockstep.models.register_reader ({PAGE})."
    )


@register_reader(llama3.Llama3)
def _read_llama(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    return _read(model, DENSE, tied=model.config.weight_tying, theta=_theta(model, llama3))


@register_reader(qwen2.Qwen2)
def _read_qwen2(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config = model.config
    theta = float(config.rope_theta)
    return _read(model, {**DENSE, **BIASES}, tied=config.use_tied_embedding, theta=theta, qkv_bias=True)


@register_reader(qwen3.Qwen3)
def _read_qwen3(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config = model.config
    experts = None
    if config.num_experts is not None:
        experts = Experts(num_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok)
    return _read(
        model,
        {**(DENSE if experts is None else EXPERTS), **QK_NORMS},
        tied=config.use_tied_embedding,
        theta=_theta(model, qwen3),
        qk_norm=True,
        experts=experts,
    )


@register_reader(gemma.Gemma)
def _read_gemma(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config = model.config
    if config.use_post_attn_norm != config.use_post_ffw_norm:
        raise _unreadable(
            model, "it has a norm after one of attention and MLP", "models that have one after both, or none"
        )
    variant = Variant(
        activation="gelu_tanh",
        post_norm=config.use_post_attn_norm,
        norm_plus_one=True,
        embed_scale=math.sqrt(config.embed_dim),
        attention_soft_cap=config.attn_logits_soft_cap,
        logit_soft_cap=config.final_logit_softcap,
    )
    return _read(
        model,
        {**GEMMA, **_gemma_projections(config)},
        tied=True,
        theta=_default(gemma.apply_rope, "max_wavelength"),
        variant=_with_layer_types(variant, model, gemma.AttentionType.LOCAL_SLIDING),
    )


@register_reader(gemma3.Gemma3)
def _read_gemma3(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config = model.config
    if model.vision_encoder is not None:
        raise _unreadable(model, "it has a vision tower, and prompts are text", "models made with text_only=True")
    by_heads = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
    variant = Variant(
        activation="gelu_tanh",
        post_norm=True,
        norm_plus_one=True,
        embed_scale=math.sqrt(config.embed_dim),
        attention_scale=(
            (config.embed_dim // config.num_heads) ** -0.5 if config.query_pre_attn_norm is by_heads else None
        ),
    )
    local = RotaryConfig(theta=float(config.local_base_frequency), linear_factor=float(config.local_scale_factor))
    return _read(
        model,
        {**GEMMA3, **_gemma_projections(config)},
        tied=True,
        theta=float(config.global_base_frequency),
        linear_factor=float(config.global_scale_factor),
        qk_norm=True,
        variant=_with_layer_types(variant, model, gemma3.AttentionType.LOCAL_SLIDING, local),
    )


def _gemma_projections(config: Any) -> Table:
    return GEMMA_QKV if config.num_heads == config.num_kv_heads else GEMMA_Q_KV


def _with_layer_types(variant: Variant, model: Any, local: Any, rope: RotaryConfig | None = None) -> Variant:
    """The variant with the attention of each layer, as its module has it.

    Args:
        local: The kind of attention that has a window.
        rope: The rotary embeddings of layers with a window; None for those of the others.
    """
    slides = [layer.attn.attn_type is local for layer in model.layers]
    if not any(slides):
        return variant
    return dataclasses.replace(
        variant,
        layer_types=tuple("sliding_attention" if is_sliding else "full_attention" for is_sliding in slides),
        sliding_window=model.config.sliding_window_size,
        sliding_rope=rope,
    )


def _read(
    model: Any, table: Table, *, tied: bool, theta: float, linear_factor: float = 1.0, **values: Any
) -> tuple[LlamaConfig, DecoderWeights]:
    """The parts that all families have in common."""
    config, parameters = model.config, named_parameters(model)
    for name, array in parameters.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise _unreadable(model, f"its {name} is quantized to {array.dtype}", "weights in a floating dtype")
    lora = LoraNames(scale=_lora_scale(model, parameters)) if any(map(_is_factor, parameters)) else None
    return LlamaConfig(
        max_seq_len=MAX_SEQ_LEN,
        hidden_dim=config.embed_dim,
        intermediate_dim=config.hidden_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layer_norm_epsilon=getattr(config, "norm_eps", 1e-6),
        rope=RotaryConfig(theta=theta, linear_factor=linear_factor),
        tie_word_embeddings=tied,
        **values,
    ), from_names(table if tied else {**table, **LM_HEAD}, lora=lora)(model)


def _is_factor(name: str) -> bool:
    return name.endswith("_lora_a")


def _lora_scale(model: Any, parameters: Mapping[str, Any]) -> float:
    """The factor of the product of an adapter's two factors, which is no parameter.

    qwix adds ``(x A) B`` times ``alpha / rank`` inside a model's call, which it wraps; its provider has the rules.
    """
    wrapped = getattr(type(model).__call__, "__closure__", None) or ()
    provider = next(
        (
            argument
            for cell in wrapped
            for argument in getattr(cell.cell_contents, "args", ())
            if isinstance(argument, qwix.LoraProvider)
        ),
        None,
    )
    scales = set()
    for name, factor in parameters.items():
        if _is_factor(name):
            module = name.rpartition(".")[0].replace(".", "/")
            rules = [] if provider is None else provider._rules
            rule = next((rule for rule in rules if re.fullmatch(rule.module_path, module)), None)
            if rule is None or getattr(rule, "rank", None) != factor.shape[-1]:
                raise _unreadable(
                    model,
                    f"no rule of its qwix provider is that of {name}, so that its alpha is not known",
                    "adapters that qwix.apply_lora_to_model made",
                )
            scales.add(rule.alpha / rule.rank)
    if len(scales) > 1:
        raise _unreadable(model, f"its adapters have the scales {sorted(scales)}", "adapters of one alpha / rank")
    return float(scales.pop())


def _theta(model: Any, module: Any) -> float:
    """The base of the rotary embeddings: that of the configuration only where attention hands it on.

    In Tunix 0.1.7 Llama 3 and Qwen3 call ``apply_rope`` without it, and so compute with its default.
    """
    if "rope_theta" in inspect.unwrap(module.Attention.block).__code__.co_names:
        return float(model.config.rope_theta)
    return _default(module.apply_rope, "rope_theta")


def _default(function: Callable[..., Any], argument: str) -> float:
    return float(inspect.signature(function).parameters[argument].default)


def _unreadable(model: Any, fault: str, can: str) -> UnreadableModelError:
    return UnreadableModelError(
        f"Tunix's {type(model).__name__} cannot be read: {fault}. The decoder can do {can}. Change the model, or leave "
        f"lockstep's hooks out of this run ({PAGE})."
    )
