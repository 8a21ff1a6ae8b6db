"""The usual errors of a reader, as settings of the forward pass of `lockstep.models.adjustable`.

`lockstep.models.check_reader` finds with them which setting or weight a reader has wrong.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from lockstep.models.adjustable import ACTIVATIONS, PAIRS, SQUARE, Settings, of_layers, settings_of
from lockstep.models.attention import NO_WINDOW
from lockstep.models.config import LayerKind, LlamaConfig, distinct, layer_kinds, rotary_frequencies
from lockstep.models.rope import Llama3Scaling, RotaryConfig
from lockstep.models.weights import DecoderWeights

THETAS: Final = (100.0, 1e3, 1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8)
LINEAR_FACTORS: Final = (1.0, 2.0, 4.0, 8.0)
EPSILONS: Final = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
MOST_EXPERTS: Final = 16
"""The largest number of a token's experts that is tried."""


def suspects(config: LlamaConfig, weights: DecoderWeights) -> Iterator[tuple[str, Settings]]:
    """A possible error of a reader, and the settings that would be right then.

    Args:
        weights: The weights, or structs of their shapes.
    """
    base = settings_of(config)
    return ((text, base | changed) for text, changed in _guesses(config, weights, base))


def _guesses(config: LlamaConfig, weights: DecoderWeights, base: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """The texts, and what of the settings would be another."""
    variant = config.variant

    def is_now(name: str, value: Any, better: Any) -> str:
        return f"{name} is {value}: it should be {better}"

    for text, kinds in _ropes(config):
        yield text, {"frequencies": np.stack([rotary_frequencies(config, rope) for rope in kinds])}
    yield "rotary embeddings: the model has none", {"frequencies": np.zeros_like(base["frequencies"])}
    yield (
        "rotary embeddings: the model rotates neighbouring elements of a head; read q and k with the even elements "
        "of a head first",
        {"interleaved": np.bool_(True)},
    )
    for epsilon in EPSILONS:
        if not math.isclose(epsilon, config.layer_norm_epsilon):
            yield is_now("layer_norm_epsilon", config.layer_norm_epsilon, epsilon), {"epsilon": np.float32(epsilon)}
    plus_one = not variant.norm_plus_one
    text = is_now("variant.norm_plus_one", variant.norm_plus_one, plus_one)
    yield text, {"norm_offset": np.float32(plus_one)}
    for scale in (None, math.sqrt(config.hidden_dim)):
        if scale != config.embed_scale:
            yield is_now("variant.embed_scale", config.embed_scale, scale), {"embed_scale": np.float32(scale or 1)}
    size = config.head_size
    wide = config.hidden_dim
    for scale in sorted({size**-0.5, 1.0, 1.0 / size, wide**-0.5, (wide / config.num_heads) ** -0.5}):
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
        now = config.experts
        yield (
            is_now("experts.norm_topk_prob", now.norm_topk_prob, not now.norm_topk_prob),
            {"norm_topk_prob": np.bool_(not now.norm_topk_prob)},
        )
        for count in range(1, min(now.num_experts, MOST_EXPERTS) + 1):
            if count != now.num_experts_per_tok:
                text = is_now("experts.num_experts_per_tok", now.num_experts_per_tok, count)
                yield text, {"experts_per_token": np.int32(count)}
    if weights.layers.gate is not None or weights.layers.expert_gate is not None:
        for number, name in enumerate(ACTIVATIONS):
            if name != variant.activation:
                yield is_now("variant.activation", variant.activation, name), {"activation": np.int32(number)}
    if weights.lm_head is not None:
        text = "lm_head: the output layer of the model is the embedding (tie_word_embeddings)"
        yield text, {"tied": np.bool_(True)}
    yield from _other_weights(config, weights)


def _ropes(config: LlamaConfig) -> Iterator[tuple[str, tuple[RotaryConfig, ...]]]:
    """Other rotary embeddings, as those of each layer."""
    now, layers = [kind.rope for kind in layer_kinds(config)], config.num_layers
    for name, rope in (("rope", config.rope), ("variant.sliding_rope", config.variant.sliding_rope)):
        if rope is not None and rope in now and math.isfinite(rope.linear_factor):
            for text, better in _other_ropes(name, rope):
                yield text, tuple(better if current == rope else current for current in now)
    if config.variant.sliding_rope is not None:
        yield "variant.sliding_rope is set: all layers have rope", (config.rope,) * layers
    elif layers > 1:
        for every, theta, base in ((6, 1e4, 1e6), (2, 1e4, config.rope.theta)):
            local = dataclasses.replace(config.rope, theta=theta, scaling=None, linear_factor=1.0)
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
    plain = dataclasses.replace(rope, scaling=None, linear_factor=1.0)
    if rope.scaling is not None:
        yield f"{name}.scaling is set: the model has none", plain
    for factor in LINEAR_FACTORS:
        if factor != rope.linear_factor:
            text = f"{name}.linear_factor is {rope.linear_factor:g}: it should be {factor:g}"
            yield text, dataclasses.replace(plain, linear_factor=factor)
    for factor in (8.0, 32.0):
        scaling = Llama3Scaling(factor=factor)
        if rope.scaling != scaling:
            text = f"{name}.scaling is {rope.scaling}: it should be {scaling}"
            yield text, dataclasses.replace(plain, scaling=scaling)


def _layer_types(config: LlamaConfig) -> Iterator[tuple[str, tuple[LayerKind, ...]]]:
    """Other layers that slide, as the kind of each layer."""
    now = layer_kinds(config)
    kinds, indices = distinct(now)
    if len(kinds) == 2:
        swapped = tuple(kinds[1 - index] for index in indices)
        yield "variant.layer_types: the layers with a window are those without one, and the other way round", swapped
        yield "variant.layer_types are those of the next layer", (*now[1:], now[0])
        yield "variant.layer_types are those of the layer before", (now[-1], *now[:-1])


def _other_weights(config: LlamaConfig, weights: DecoderWeights) -> Iterator[tuple[str, dict[str, Any]]]:
    """Weights that were taken for others, or read in another order."""
    group, layers = config.q_heads_per_group, config.num_layers
    if 1 < group < config.num_heads:
        order = np.arange(config.num_heads, dtype=np.int32).reshape(group, config.num_kv_heads).T.reshape(-1)
        text = "q and o: the model's query head i belongs to kv head i % num_kv_heads; read them as 'group kv_head'"
        yield text, {"heads": order}
    for number, pair in enumerate(PAIRS):
        first, second = (getattr(weights.layers, name) for name in pair)
        if first is not None and second is not None and first.shape == second.shape:
            flags = np.arange(len(PAIRS)) == number
            yield f"{pair[0]} and {pair[1]} are swapped", {"swapped": flags}
    for number, name in enumerate(SQUARE):
        if math.prod(getattr(weights.layers, name).shape[1:]) == config.hidden_dim**2:
            flags = np.arange(len(SQUARE)) == number
            yield f"{name} is transposed", {"transposed": flags}
    if layers > 1:
        yield "the layers are in reverse order", {"layers": np.arange(layers, dtype=np.int32)[::-1].copy()}
    if layers > 10:
        by_text = sorted(range(layers), key=str)
        order = np.argsort(by_text).astype(np.int32)
        yield "the layers are ordered by the text of their number: 10 before 2", {"layers": order}
