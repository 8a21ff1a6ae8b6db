"""Whether a model's weights have the sizes and axes that its configuration says, by their shapes alone."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig
from lockstep.models.weights import (
    JOINED_DELTA,
    LINEAR_WEIGHTS,
    SPLIT_DELTA,
    STACKED,
    WEIGHT_AXES,
    WIDE,
    DecoderWeights,
    attention_of,
)

OWN_NORMS: Final = ("routed_norm", "routed_post_norm", "shared_post_norm", "router_scale", "router_factors")
"""The weights of experts that have norms of their own."""

HEAD_AXES: Final = ("kv_head", "group", "head")
"""The axes that may be flattened into fewer, in this order."""


def check_weights(config: LlamaConfig, weights: DecoderWeights) -> None:
    """Refuse weights that are not those of the configuration: a size, an order of axes, one too many or too few.

    Args:
        weights: Arrays, shape structs or `LazyWeight`; their shapes alone are read.

    Raises:
        ConfigError: Names the weight, what it has, and what the configuration says.
    """
    arrays = {
        name: array
        for name in WEIGHT_AXES
        if (array := getattr(weights.layers if name in STACKED else weights, name)) is not None
    }
    for name, (setting, present) in _presence(config).items():
        if present != (name in arrays):
            raise ConfigError(
                f"the model's configuration has {setting}, and its weights have {'no ' if present else ''}{name}: "
                f"samples would be those of another model. Correct {setting.partition(' ')[0]}, or read "
                f"{name + ' too' if present else 'no ' + name}."
            )
    sizes = {"vocab": int(arrays["embed"].shape[0])}
    for name, array in arrays.items():
        own = sizes | sizes_of(config, name) | ({"layer": len(config.layers_of(name))} if name in STACKED else {})
        if not _fits(WEIGHT_AXES[name], tuple(array.shape), own):
            raise _misfit(name, tuple(array.shape), own)


def sizes_of(config: LlamaConfig, name: str) -> dict[str, int]:
    """The size of each axis of a weight by the axis's name, as far as the configuration has it."""
    config = config.of_attention(attention_of(name) or "full")
    sizes = {"one": 1, "group": config.q_heads_per_group}
    sizes |= {axis: size for axis, path in _PATHS.items() if (size := _value(config, path)) is not None}
    sizes["head"] = config.value_size if name in ("o", WIDE["o"]) else config.head_size
    if config.experts is not None:
        sizes |= {"expert_mlp": config.expert_dim, "gate_up": 2 * config.expert_dim}
    if config.variant.gated_attention:
        sizes["gated_head"] = 2 * config.head_size
    if (linear := config.linear_attention) is not None:
        sizes |= {"value_group": linear.group, "qkvz": linear.qkvz, "gates": 2 * linear.group}
    if (latent := config.latent) is not None:
        sizes |= {"latent": latent.size, "key_value": latent.qk_nope_head_dim + latent.v_head_dim}
    return sizes


def _value(config: Any, path: str) -> Any:
    """The value of a setting; None where the configuration has no such part."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


_PATHS: Final = {
    "embed": "hidden_dim",
    "kv_head": "num_kv_heads",
    "mlp": "intermediate_dim",
    "expert": "experts.num_experts",
    "shared_mlp": "experts.shared_intermediate_dim",
    "rank": "variant.gated_norm_rank",
    "key_head": "linear_attention.key_heads",
    "key": "linear_attention.key_head_dim",
    "value": "linear_attention.value_head_dim",
    "width": "linear_attention.conv_width",
    "q_rank": "latent.q_lora_rank",
    "q_latent": "latent.q_lora_rank",
    "kv_latent": "latent.kv_lora_rank",
}
SETTINGS: Final[Mapping[str, str]] = _PATHS | {
    "layer": "num_layers",
    "group": "num_heads / num_kv_heads",
    "head": "head_dim",
    "expert_mlp": "experts.intermediate_dim",
    "gate_up": "2 * experts.intermediate_dim",
    "gated_head": "2 * head_dim",
    "value_group": "linear_attention.value_heads / linear_attention.key_heads",
    "latent": "latent.kv_lora_rank + latent.qk_rope_head_dim",
    "key_value": "latent.qk_nope_head_dim + latent.v_head_dim",
    "vocab": "the rows of embed",
}
"""The setting that an axis has its size from."""


def absent_weights(config: LlamaConfig) -> set[str]:
    """The names of the weights that a setting says a model does not have."""
    return {name for name, (_, present) in _presence(config).items() if not present}


def _presence(config: LlamaConfig) -> dict[str, tuple[str, bool]]:
    """For weights that a setting decides on, the setting with its value, and whether there must be one."""
    variant, latent = config.variant, config.latent is not None
    wide = "wide" in config.attention_kinds
    low_rank = config.latent is not None and config.latent.q_lora_rank is not None
    scoring, linear = config.experts and config.experts.scoring, config.linear_attention is not None
    settings = {
        "tie_word_embeddings": (config.tie_word_embeddings, {"lm_head": not config.tie_word_embeddings}),
        "qkv_bias": (config.qkv_bias, dict.fromkeys(("q_bias", "k_bias", "v_bias"), config.qkv_bias)),
        "latent": (
            config.latent,
            dict.fromkeys(("kv_a", "kv_a_norm", "kv_b"), latent) | dict.fromkeys(("k", "v"), not latent),
        ),
        "latent.q_lora_rank": (
            config.latent and config.latent.q_lora_rank,
            dict.fromkeys(("q_a", "q_a_norm", "q_b"), low_rank),
        ),
        "wide": (getattr(config, "wide", None), dict.fromkeys(("wide_q", "wide_k", "wide_o"), wide)),
        "wide.keys_are_values": (config.keys_are_values, {"wide_v": wide and not config.keys_are_values}),
        "layer_scalars": (config.layer_scalars, {"layer_scalar": config.layer_scalars}),
        "qk_norm": (
            config.qk_norm,
            dict.fromkeys(("q_norm", "k_norm"), config.qk_norm and not variant.wide_qk_norm)
            | dict.fromkeys((WIDE["q_norm"], WIDE["k_norm"]), wide and config.qk_norm),
        ),
        "variant.wide_qk_norm": (
            variant.wide_qk_norm,
            dict.fromkeys(("q_wide_norm", "k_wide_norm"), variant.wide_qk_norm),
        ),
        "variant.pre_norm": (variant.pre_norm, {name: name in variant.norms for name in ("attn_norm", "mlp_norm")}),
        "variant.post_norm": (
            variant.post_norm,
            {name: name in variant.norms for name in ("attn_post_norm", "mlp_post_norm")},
        ),
        "variant.embed_norm": (variant.embed_norm, {"embed_norm": variant.embed_norm}),
        "variant.o_bias": (variant.o_bias, {"o_bias": variant.o_bias}),
        "variant.attention_sinks": (variant.attention_sinks, {"sinks": variant.attention_sinks}),
        "variant.head_gates": (variant.head_gates, {"head_gate": variant.head_gates}),
        "variant.gated_attention": (
            variant.gated_attention,
            {"gated_q": variant.gated_attention, "q": not (variant.gated_attention or low_rank)},
        ),
        "experts": (config.experts, dict.fromkeys(OWN_NORMS, config.experts is not None and config.experts.own_norms)),
        "experts.scoring": (scoring, {"router_bias": scoring not in (None, "softmax") or variant.fused_gate}),
        "linear_attention": (
            config.linear_attention,
            dict.fromkeys(sorted(LINEAR_WEIGHTS - {*JOINED_DELTA, *SPLIT_DELTA}), linear),
        ),
        "variant.split_delta": (
            variant.split_delta,
            dict.fromkeys(SPLIT_DELTA, linear and variant.split_delta)
            | dict.fromkeys(JOINED_DELTA, linear and not variant.split_delta),
        ),
    }
    return {
        name: (f"{setting} = {value}", present)
        for setting, (value, weights) in settings.items()
        for name, present in weights.items()
    }


def _fits(axes: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether an array has these axes, of which those of heads may be flattened into fewer."""
    if not axes or not shape:
        return not axes and not shape
    heads = len(list(itertools.takewhile(HEAD_AXES.__contains__, axes)))
    return any(
        (axes[0] not in sizes or math.prod(sizes[axis] for axis in axes[:joint]) == shape[0])
        and _fits(axes[joint:], shape[1:], sizes)
        for joint in range(1, max(heads, 1) + 1)
    )


def _misfit(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> ConfigError:
    axes = WEIGHT_AXES[name]
    listed = ", ".join(f"{axis} {sizes.get(axis, 'any')}" for axis in axes)
    settings = ", ".join(SETTINGS[axis] for axis in axes if axis in sizes and axis in SETTINGS)
    fix = f"Correct {settings} in the configuration, or the array that the reader takes for {name}."
    if any(_fits(axes, order, sizes) for order in itertools.permutations(shape)):
        fix = (
            f'Its axes are in another order: give it as lockstep.models.view(array, "... -> {" ".join(axes)}"), with '
            "the names in the order of the array on the left."
        )
    return ConfigError(f"the weight {name} has the shape {shape}, and the model's configuration says ({listed}). {fix}")
