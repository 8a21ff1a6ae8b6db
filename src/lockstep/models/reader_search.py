"""The usual errors of a reader, as settings of the forward pass of `lockstep.models.adjustable`.

`lockstep.models.check_reader` finds with them which setting or weight a reader has wrong.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from lockstep.models.adjustable import (
    ACTIVATIONS,
    PAIRS,
    SCORINGS,
    SQUARE,
    Settings,
    attention_kinds,
    of_layers,
    of_ropes,
    settings_of,
    units_of,
)
from lockstep.models.attention import NO_WINDOW
from lockstep.models.config import LlamaConfig
from lockstep.models.delta_rule import LinearAttention
from lockstep.models.experts import Experts
from lockstep.models.layer_kinds import LayerKind, distinct, layer_kinds
from lockstep.models.rope import Llama3Scaling, RotaryConfig, YarnScaling
from lockstep.models.weights import DecoderWeights

THETAS: Final = (100.0, 1e3, 1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8)
LINEAR_FACTORS: Final = (1.0, 2.0, 4.0, 8.0)
YARNS: Final = (
    YarnScaling(factor=4.0, original_max_position_embeddings=32768),
    YarnScaling(factor=8.0, original_max_position_embeddings=8192),
    YarnScaling(truncate=False),
    YarnScaling(factor=40.0),
)
"""Those of Qwen, OLMo 3, gpt-oss and DeepSeek."""
EPSILONS: Final = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
ROUTED_FACTORS: Final = (1.0, 1.5, 1.8, 2.446, 2.5, 16.0)
MOST_EXPERTS: Final = 16
"""The largest number of a token's experts that is tried."""
type Guess = tuple[str, dict[str, Any]]
"""A text, and what of the settings would be another."""


def suspects(config: LlamaConfig, weights: DecoderWeights) -> Iterator[tuple[str, Settings]]:
    """A possible error of a reader, and the settings that would be right then.

    Args:
        weights: The weights, or structs of their shapes.
    """
    base = settings_of(config)
    return ((text, base | changed) for text, changed in _guesses(config, weights, base))


def _guesses(config: LlamaConfig, weights: DecoderWeights, base: Settings) -> Iterator[Guess]:
    variant = config.variant
    yield from _positions(config, base)
    for epsilon in EPSILONS:
        if not math.isclose(epsilon, config.layer_norm_epsilon):
            yield is_now("layer_norm_epsilon", config.layer_norm_epsilon, epsilon), {"epsilon": np.float32(epsilon)}
    plus_one = not variant.norm_plus_one
    text = is_now("variant.norm_plus_one", variant.norm_plus_one, plus_one)
    yield text, {"norm_offset": np.float32(plus_one)}
    yield from _scales(config, base)
    if variant.sliding_window is not None:
        slides = base["window"] < NO_WINDOW
        for window in (None, variant.sliding_window - 1, variant.sliding_window + 1):
            text = is_now("variant.sliding_window", variant.sliding_window, window)
            sizes = np.where(slides, NO_WINDOW if window is None else window, NO_WINDOW).astype(np.int32)
            yield text, {"window": sizes}
        if config.layer_types is not None:
            for text, kinds_ in _layer_types(config):
                yield text, of_layers(config, kinds_)
    if config.experts is not None:
        yield from _choices(config.experts, biased=weights.layers.router_bias is not None)
    if weights.layers.gate is not None or weights.layers.expert_gate is not None:
        for number, name in enumerate(ACTIVATIONS):
            if name != variant.activation:
                yield is_now("variant.activation", variant.activation, name), {"activation": np.int32(number)}
    if weights.lm_head is not None:
        text = "lm_head: the output layer of the model is the embedding (tie_word_embeddings)"
        yield text, {"tied": np.bool_(True)}
    yield from _other_weights(config, weights)
    yield from _other_orders(config, weights, base)
    if config.linear_attention is not None:
        yield from _memories(config.linear_attention, base, split=variant.split_delta)


def is_now(name: str, value: Any, better: Any) -> str:
    """The text of a setting that should have another value."""
    return f"{name} is {value}: it should be {better}"


def _positions(config: LlamaConfig, base: Settings) -> Iterator[Guess]:
    """Other rotary embeddings, with the factors of attention scores that they bring."""
    for text, ropes in _ropes(config):
        yield text, of_ropes(config, ropes)
    yield "rotary embeddings: the model has none", {"frequencies": np.zeros_like(base["frequencies"])}
    interleaved = config.variant.interleaved_rope
    better = "False" if interleaved else "True, for the model rotates neighbouring elements of a head"
    yield is_now("variant.interleaved_rope", interleaved, better), _changed(base, _other_pairs(config))


def _other_pairs(config: LlamaConfig) -> dict[str, np.ndarray]:
    """The orders in which elements are rotated with others: neighbours, or those half a head apart."""
    latent = config.latent
    rotated = config.rope.rotated(config.rotary_size) if latent is None else latent.qk_rope_head_dim
    pairs = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2)])
    pairs = np.argsort(pairs) if config.variant.interleaved_rope else pairs
    firsts = dict.fromkeys(
        ("q", "gated_q", "k", "q_bias", "k_bias", "q_norm", "k_norm", "q_wide_norm", "k_wide_norm"), 0
    )
    if latent is not None:
        firsts = {"q": latent.qk_nope_head_dim, "q_b": latent.qk_nope_head_dim, "kv_a": latent.kv_lora_rank}
    orders = {}
    for name, first in firsts.items():
        if (index := units_of(config, name)) is not None:
            index[..., first : first + rotated] = index[..., first : first + rotated][..., pairs]
            orders[name] = index
    return orders


def _scales(config: LlamaConfig, base: Settings) -> Iterator[Guess]:
    """Other factors and soft caps."""
    variant, size, wide = config.variant, config.head_size, config.hidden_dim
    for scale in (None, math.sqrt(wide)):
        if scale != config.embed_scale:
            yield is_now("variant.embed_scale", config.embed_scale, scale), {"embed_scale": np.float32(scale or 1)}
    scales = {size**-0.5, 1.0, 1.0 / size, wide**-0.5, (wide / config.num_heads) ** -0.5}
    if config.latent is not None:
        scales |= {config.latent.qk_nope_head_dim**-0.5, config.latent.size**-0.5}
    for scale in sorted(scales):
        if not math.isclose(scale, base["attention_scale"], rel_tol=1e-5):
            text = is_now("variant.attention_scale", variant.attention_scale, f"{scale:.6g}")
            yield text, {"attention_scale": np.float32(scale)}
    for field, setting, caps in (
        ("attention_soft_cap", "attention_cap", (None, 20.0, 30.0, 50.0)),
        ("logit_soft_cap", "logit_cap", (None, 15.0, 20.0, 30.0, 50.0)),
    ):
        for cap in caps:
            if cap != getattr(variant, field):
                text = is_now(f"variant.{field}", getattr(variant, field), cap)
                yield text, {setting: np.float32(cap or 0)}


def _choices(now: Experts, *, biased: bool) -> Iterator[Guess]:
    """Other choices and shares of experts.

    Args:
        biased: Whether the router has a bias, without which it is one thing whether logits or sigmoids are ranked.
    """
    yield (
        is_now("experts.norm_topk_prob", now.norm_topk_prob, not now.norm_topk_prob),
        {"norm_topk_prob": np.bool_(not now.norm_topk_prob)},
    )
    for count in range(1, min(now.num_experts, MOST_EXPERTS) + 1):
        if count != now.num_experts_per_tok:
            text = is_now("experts.num_experts_per_tok", now.num_experts_per_tok, count)
            yield text, {"experts_per_token": np.int32(count)}
    for count in range(1, now.groups + 1):
        enough = count * (now.num_experts // now.groups) >= now.num_experts_per_tok
        if enough and count != now.groups_per_tok:
            yield is_now("experts.groups_per_tok", now.groups_per_tok, count), {"groups_per_token": np.int32(count)}
    for factor in ROUTED_FACTORS:
        if factor != now.routed_scaling_factor:
            text = is_now("experts.routed_scaling_factor", now.routed_scaling_factor, factor)
            yield text, {"routed_scale": np.float32(factor)}
    for scoring in SCORINGS if biased else ("softmax", "biased_sigmoid"):
        if scoring != now.scoring:
            yield is_now("experts.scoring", now.scoring, scoring), {"scoring": np.int32(SCORINGS.index(scoring))}


def _ropes(config: LlamaConfig) -> Iterator[tuple[str, tuple[RotaryConfig, ...]]]:
    """Other rotary embeddings, as those of each layer."""
    now, layers, sliding = [kind.rope for kind in layer_kinds(config)], config.num_layers, config.variant.sliding_rope
    two = sliding not in (None, config.rope)
    for name, rope in (("rope", config.rope), *((("variant.sliding_rope", sliding),) if two else ())):
        if rope is not None and rope in now and math.isfinite(rope.linear_factor):
            for text, better in _other_ropes(name, rope):
                yield text, tuple(better if current == rope else current for current in now)
    plain, windows = _unscaled(config.rope), [kind == "sliding_attention" for kind in config.layer_types or ()]
    if not two and 0 < sum(windows) < layers and config.variant.full_rope:
        if plain != config.rope:
            text = is_now("variant.sliding_rope", sliding, plain)
            yield text, tuple(plain if window else config.rope for window in windows)
        for better in _with_yarn(config.rope):
            text = is_now("rope.yarn", None, f"{better.yarn}, in layers without a window alone")
            yield text, tuple(plain if window else better for window in windows)
    if two:
        yield "variant.sliding_rope is set: all layers have rope", (config.rope,) * layers
    elif layers > 1:
        for every, theta, base in ((6, 1e4, 1e6), (2, 1e4, config.rope.theta)):
            local = dataclasses.replace(plain, theta=theta)
            own = dataclasses.replace(config.rope, theta=base)
            kinds = tuple(own if layer % every == every - 1 else local for layer in range(layers))
            if kinds != tuple(now) and len(set(kinds)) > 1:
                yield (
                    f"variant.sliding_rope is None: all layers but every {every}. should have the base {theta:g}, and "
                    f"those {base:g}",
                    kinds,
                )


def _other_ropes(name: str, rope: RotaryConfig) -> Iterator[tuple[str, RotaryConfig]]:
    for theta in THETAS:
        if theta != rope.theta:
            yield f"{name}.theta is {rope.theta:g}: it should be {theta:g}", dataclasses.replace(rope, theta=theta)
    plain = _unscaled(rope)
    if rope.scaling is not None:
        yield f"{name}.scaling is set: the model has none", plain
    if rope.yarn is not None:
        yield f"{name}.yarn is set: the model has none", plain
        paper = dataclasses.replace(rope.yarn, attention_factor=None).amplitude
        for factor in sorted({1.0, math.sqrt(paper), paper}):
            if not math.isclose(factor, rope.yarn.amplitude, rel_tol=1e-5):
                text = is_now(f"{name}.yarn.attention_factor", f"{rope.yarn.amplitude:.6g}", f"{factor:.6g}")
                yield text, dataclasses.replace(rope, yarn=dataclasses.replace(rope.yarn, attention_factor=factor))
    for better in _with_yarn(rope):
        yield is_now(f"{name}.yarn", None, better.yarn), better
    for factor in LINEAR_FACTORS:
        if factor != rope.linear_factor:
            text = f"{name}.linear_factor is {rope.linear_factor:g}: it should be {factor:g}"
            yield text, dataclasses.replace(plain, linear_factor=factor)
    for factor in (8.0, 32.0):
        scaling = Llama3Scaling(factor=factor)
        if rope.scaling != scaling:
            text = f"{name}.scaling is {rope.scaling}: it should be {scaling}"
            yield text, dataclasses.replace(plain, scaling=scaling)


def _unscaled(rope: RotaryConfig) -> RotaryConfig:
    return dataclasses.replace(rope, scaling=None, yarn=None, linear_factor=1.0)


def _with_yarn(rope: RotaryConfig) -> list[RotaryConfig]:
    scaled = rope.yarn is not None or rope.partial_rotary_factor != 1
    return [] if scaled else [dataclasses.replace(_unscaled(rope), yarn=yarn) for yarn in YARNS]


def _layer_types(config: LlamaConfig) -> Iterator[tuple[str, tuple[LayerKind, ...]]]:
    """Other layers that slide, as the kind of each layer."""
    now = layer_kinds(config)
    kinds, indices = distinct(now)
    if len(kinds) == 2:
        swapped = tuple(kinds[1 - index] for index in indices)
        yield "variant.layer_types: the layers with a window are those without one, and the other way round", swapped
        yield "variant.layer_types are those of the next layer", (*now[1:], now[0])
        yield "variant.layer_types are those of the layer before", (now[-1], *now[:-1])


def _other_weights(config: LlamaConfig, weights: DecoderWeights) -> Iterator[Guess]:
    """Weights that were taken for others, or read in another order."""
    layers = config.num_layers
    for number, pair in enumerate(PAIRS):
        first, second = (getattr(weights.layers, name) for name in pair)
        if first is not None and second is not None and first.shape == second.shape:
            flags = np.arange(len(PAIRS)) == number
            yield f"{pair[0]} and {pair[1]} are swapped", {"swapped": flags}
    for number, name in enumerate(SQUARE):
        weight = getattr(weights.layers, name)
        if weight is not None and math.prod(weight.shape[1:]) == config.hidden_dim**2:
            flags = np.arange(len(SQUARE)) == number
            yield f"{name} is transposed", {"transposed": flags}
    if layers > 1:
        yield "the layers are in reverse order", {"layers": np.arange(layers, dtype=np.int32)[::-1].copy()}
    if layers > 10:
        by_text = sorted(range(layers), key=str)
        order = np.argsort(by_text).astype(np.int32)
        yield "the layers are ordered by the text of their number: 10 before 2", {"layers": order}


def _other_orders(config: LlamaConfig, weights: DecoderWeights, base: Settings) -> Iterator[Guess]:
    """Heads and their parts that a weight has in another order."""
    heads, group, size, latent = config.num_heads, config.q_heads_per_group, config.head_size, config.latent
    if 1 < group < heads:
        order = np.arange(heads).reshape(group, -1).T.reshape(-1)
        names = ("q", "gated_q", "q_bias", "q_wide_norm", "o", "sinks", "head_gate")
        indices = {name: index for name in names if (index := units_of(config, name)) is not None}
        text = "q and o: the model's query head i belongs to kv head i % num_kv_heads; read them as 'group kv_head'"
        yield text, _changed(base, {name: index.reshape(heads, -1)[order] for name, index in indices.items()})
    if config.variant.gated_attention:
        for text, order in (
            ("gated_q: the model has the gate of a head before its query", _parts(heads, (size, size), (1, 0))),
            ("gated_q: the model has the queries of all heads before their gates", _apart(heads, (size, size))),
        ):
            yield text, _changed(base, {"gated_q": order})
    if latent is not None:
        name, rank, rope = "q" if latent.q_lora_rank is None else "q_b", latent.kv_lora_rank, latent.qk_rope_head_dim
        query, made = (latent.qk_nope_head_dim, rope), (latent.qk_nope_head_dim, latent.v_head_dim)
        for text, changed, order in (
            ("the model has the rotated part of a query first", name, _parts(heads, query, (1, 0))),
            ("the model has the rotated key before the latent", "kv_a", _parts(1, (rank, rope), (1, 0))),
            ("the model has the value of a head before its key", "kv_b", _parts(heads, made, (1, 0))),
            ("the model has the keys of all heads before their values", "kv_b", _apart(heads, made)),
        ):
            yield f"{changed}: {text}", _changed(base, {changed: order})


def _memories(of: LinearAttention, base: Settings, *, split: bool) -> Iterator[Guess]:
    """Other decays, norms and orders of linear attention, see `lockstep.models.delta_rule`.

    Args:
        split: Whether the parts of a key head are weights of their own, so that each has one order.
    """
    keys, group, values = of.key_heads, of.group, of.group * of.value_head_dim
    widths, gates = (of.key_head_dim, of.key_head_dim, values, values), (group, group)
    of_parts = (
        ("linear_qkvz: queries and keys are swapped", {"linear_qkvz": _parts(keys, widths, (1, 0, 2, 3))}),
        ("linear_qkvz: values and gates are swapped", {"linear_qkvz": _parts(keys, widths, (0, 1, 3, 2))}),
        ("linear_gates: writes and decays are swapped", {"linear_gates": _parts(keys, gates, (1, 0))}),
        ("linear_qkvz: the model has all queries, then keys, values and gates", {"linear_qkvz": _apart(keys, widths)}),
        ("linear_gates: the model has all writes before all decays", {"linear_gates": _apart(keys, gates)}),
        (
            "linear_qkvz and linear_gates: the model has each part of all heads before the next part",
            {"linear_qkvz": _apart(keys, widths), "linear_gates": _apart(keys, gates)},
        ),
    )
    for text, orders in (
        *(() if split else of_parts),
        ("linear_conv: the model has the token's own position first", _taps(of, base)),
        (
            "linear_: the model's value head i belongs to key head i % linear_attention.key_heads",
            _value_heads(of, base),
        ),
    ):
        yield text, _changed(base, orders)
    yield (
        "linear_norm: the model multiplies by 1 + weight; read the weight plus 1",
        {"linear_norm_offset": np.float32(1.0)},
    )
    yield "linear_decay: it is a rate; read its logarithm", {"plain_decay": np.bool_(True)}
    for text, step in (("next layer", -1), ("layer before", 1)):
        linear = np.roll(base["linear"], step)
        if not np.array_equal(linear, base["linear"]):
            yield f"variant.layer_types are those of the {text}", attention_kinds(linear)


def _taps(of: LinearAttention, base: Settings) -> dict[str, np.ndarray]:
    """The convolutions with their positions in reverse order."""
    names = [f"linear_conv_{name}" for name in "qkv"]
    return {name: base["orders"][name].reshape(-1, of.conv_width)[:, ::-1] for name in names}


def _value_heads(of: LinearAttention, base: Settings) -> dict[str, np.ndarray]:
    """The weights of value heads in the order that those of a key head are far apart in."""
    order = np.arange(of.value_heads).reshape(of.group, of.key_heads).T.reshape(-1)
    names = ("linear_conv_v", "linear_decay", "linear_decay_bias", "linear_o", *(f"linear_{part}" for part in "vzba"))
    orders = {name: base["orders"][name].reshape(of.value_heads, -1)[order] for name in names}
    for name, first in (("linear_qkvz", 2 * of.key_head_dim), ("linear_gates", 0)):
        index = base["orders"][name].reshape(of.key_heads, -1)
        for part in np.split(index[:, first:].copy(), 2, axis=1):
            mixed = part.reshape(of.value_heads, -1)[order].reshape(part.shape)
            index = np.concatenate([index[:, :first], mixed], axis=1)
            first += part.shape[1]
        orders[name] = index
    return orders


def _parts(count: int, sizes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """The places of the parts of each of ``count`` heads, where the model has them in another order.

    Args:
        sizes: The elements of each part.
        order: The numbers of the parts as the model has them.
    """
    begins = dict(zip(order, np.cumsum([0, *(sizes[part] for part in order)]), strict=False))
    inside = np.concatenate([begins[part] + np.arange(size) for part, size in enumerate(sizes)])
    return sum(sizes) * np.arange(count)[:, None] + inside


def _apart(count: int, sizes: Sequence[int]) -> np.ndarray:
    """The places of the parts of each of ``count`` heads, where the model has each part of all heads together."""
    begins = count * np.cumsum([0, *sizes])
    parts = [begin + np.arange(count * size).reshape(count, -1) for begin, size in zip(begins, sizes, strict=False)]
    return np.concatenate(parts, axis=1)


def _changed(base: Settings, orders: dict[str, np.ndarray]) -> dict[str, Any]:
    """The settings with weights in other orders."""
    flat = {name: order.reshape(-1).astype(np.int32) for name, order in orders.items()}
    return {"orders": base["orders"] | flat}
