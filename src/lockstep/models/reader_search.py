"""The usual errors of a reader, as settings of a forward pass: one compiled program tries any of them on a model.

The pass is that of `lockstep.models.block` with an attention of its own, in float32, whose settings are numbers that it
is given. `lockstep.models.check_reader` finds with it which setting or weight a reader has wrong.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lockstep.models import block
from lockstep.models.attention import NO_WINDOW
from lockstep.models.config import LayerKind, LlamaConfig, distinct, layer_kinds, rotary_frequencies
from lockstep.models.rope import Llama3Scaling, RotaryConfig
from lockstep.models.weights import DecoderWeights

ACTIVATIONS: Final = tuple(block.ACTIVATIONS)
PAIRS: Final = (
    ("gate", "up"),
    ("expert_gate", "expert_up"),
    ("shared_gate", "shared_up"),
    ("k", "v"),
    ("attn_norm", "mlp_norm"),
    ("attn_post_norm", "mlp_post_norm"),
    ("attn_post_norm", "mlp_norm"),
    ("q_norm", "k_norm"),
)
"""Weights of one shape that a reader can take for each other."""
SQUARE: Final = ("q", "k", "v", "o")
"""Weights that can be square, so that their transpose has the right shape too."""
THETAS: Final = (100.0, 1e3, 1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8)
LINEAR_FACTORS: Final = (1.0, 2.0, 4.0, 8.0)
EPSILONS: Final = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
MOST_EXPERTS: Final = 16
"""The largest number of a token's experts that is tried."""

type Settings = dict[str, Any]
"""Arrays by name, so that another value needs no other program; see `settings_of`."""


def settings_of(config: LlamaConfig) -> Settings:
    """The settings that a configuration says, as NumPy arrays."""
    variant, kinds = config.variant, layer_kinds(config)
    known, experts = variant.activation in ACTIVATIONS, config.experts
    return {
        **_of_layers(config, kinds),
        "interleaved": np.bool_(False),  # element 2 i of a head is rotated with 2 i + 1, not i with i + half
        "epsilon": np.float32(config.layer_norm_epsilon),
        "norm_offset": np.float32(variant.norm_offset),
        "embed_scale": np.float32(config.embed_scale or 1.0),
        "attention_scale": np.float32(config.attention_scale or config.head_size**-0.5),
        "attention_cap": np.float32(variant.attention_soft_cap or 0.0),  # 0 for none
        "logit_cap": np.float32(variant.logit_soft_cap or 0.0),
        "activation": np.int32(ACTIVATIONS.index(variant.activation) if known else 0),
        "tied": np.bool_(config.tie_word_embeddings),
        "heads": np.arange(config.num_heads, dtype=np.int32),  # the model's query head that is the decoder's i-th
        "layers": np.arange(config.num_layers, dtype=np.int32),  # the model's layer that is the decoder's i-th
        "experts_per_token": np.int32(experts.num_experts_per_tok if experts else 0),
        "norm_topk_prob": np.bool_(experts is not None and experts.norm_topk_prob),
        "swapped": np.zeros(len(PAIRS), bool),
        "transposed": np.zeros(len(SQUARE), bool),
    }


def _of_layers(config: LlamaConfig, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    """Radians per token ``[layer, half_head]`` and positions that a query attends to ``[layer]``."""
    return {
        "frequencies": np.stack([rotary_frequencies(config, kind.rope) for kind in kinds]),
        "window": np.array([kind.window or NO_WINDOW for kind in kinds], np.int32),
    }


def adjustable_logits(
    config: LlamaConfig, weights: DecoderWeights, ids: Int[Array, "batch position"], settings: Settings
) -> Float[Array, "batch position vocab"]:
    """The logits of a model in float32, with settings that need not be those of its configuration.

    Args:
        config: The configuration, for the sizes alone.
        weights: The weights; computed with in float32.
    """
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    kv, group, head = config.num_kv_heads, config.q_heads_per_group, config.head_size
    position = jnp.arange(ids.shape[1])
    distance = position[:, None] - position

    def norm(x: Array, weight: Array | None) -> Array:
        return block.rms_norm(x, weight, settings["epsilon"], offset=settings["norm_offset"])

    def layer(x: Array, inputs: Any) -> tuple[Array, None]:
        parts, frequencies, window = inputs
        w = types.SimpleNamespace(**parts)
        angles = block.rope_angles(position, [frequencies])[:, None]

        def project(h: Array, name: str) -> Array:
            out, bias = jnp.tensordot(h, getattr(w, name), 1), getattr(w, f"{name}_bias")
            return out if bias is None else out + bias

        def attend(h: Array) -> Array:
            h = block.gated_norm(h, w.attn_norm_down, w.attn_norm_up)
            q, k, v = project(h, "q"), project(h, "k"), project(h, "v")
            q, k = norm(norm(q, w.q_norm), w.q_wide_norm), norm(norm(k, w.k_norm), w.k_wide_norm)
            q, k = (block.unit_norm(each, config.variant.unit_qk_norm) for each in (q, k))
            q, k = (block.rotate(each, jnp.cos(angles), jnp.sin(angles)) for each in (q, k))
            scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(*ids.shape, kv, group, head), k)
            scores = _capped(scores * settings["attention_scale"], settings["attention_cap"])
            scores = jnp.where((distance >= 0) & (distance < window), scores, -jnp.inf)
            if w.sinks is not None:
                nothing = jnp.broadcast_to(w.sinks.reshape(kv, group, 1, 1), (*scores.shape[:-1], 1))
                scores = jnp.concatenate([scores, nothing], axis=-1)
            out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores)[..., : ids.shape[1]], v)
            if config.variant.exclusive_attention:
                out = block.exclusive(out, v[..., None, :])
            out = out.reshape(*ids.shape, kv * group, head)
            if w.head_gate is not None:
                out *= block.head_gates(h @ w.head_gate)[..., None]
            out = jnp.tensordot(out, w.o, 2)
            return out if w.o_bias is None else out + w.o_bias

        def activate(h: Array) -> Array:
            activated: Array = jax.lax.switch(settings["activation"], list(block.ACTIVATIONS.values()), h)
            return activated

        def experts(h: Array) -> Array:
            return _mixture(h, w, settings, activate, config)

        def dense(h: Array) -> Array:
            up = h @ w.up
            if w.gate is None:
                inner = block.xielu(up, w.xielu_p, w.xielu_n, w.xielu_beta, w.xielu_eps)
            else:
                inner = activate(h @ w.gate) * up
            out: Array = inner @ w.down
            return out

        def mlp(h: Array) -> Array:
            h = block.gated_norm(h, w.mlp_norm_down, w.mlp_norm_up)
            if w.router is None or w.up is None:
                return experts(h) if w.up is None else dense(h)
            out: Array = jax.lax.cond(w.dense, dense, experts, h)
            return out

        return block.layer(x, attend, mlp, norm, w), None

    x = norm(settings["embed_scale"] * weights.embed[ids], weights.embed_norm)
    x = block.gated_norm(x, weights.embed_norm_down, weights.embed_norm_up)
    x, _ = jax.lax.scan(layer, x, (_layers(config, weights, settings), settings["frequencies"], settings["window"]))
    output = weights.embed.T
    if weights.lm_head is not None:
        output = jnp.where(settings["tied"], output, weights.lm_head)
    x = block.gated_norm(norm(x, weights.final_norm), weights.final_norm_down, weights.final_norm_up)
    return _capped(x @ output, settings["logit_cap"])


def _mixture(
    h: Array, w: types.SimpleNamespace, settings: Settings, activate: Callable[[Array], Array], config: LlamaConfig
) -> Array:
    """The answers of experts by the weights of a token's own; all experts compute all tokens."""

    def product(equation: str, x: Array, name: str) -> Array:
        out, bias = jnp.einsum(equation, x, getattr(w, name)), getattr(w, f"{name}_bias", None)
        return out if bias is None else out + bias

    logits = product("bte,ex->btx", h, "router")
    ranks = jnp.argsort(jnp.argsort(-logits, axis=-1), axis=-1)
    assert config.experts is not None
    sigmoid = config.experts.scoring == "sigmoid"
    scores = jax.nn.sigmoid(logits - w.router_bias) if sigmoid else jax.nn.softmax(logits)
    shares = jnp.where(ranks < settings["experts_per_token"], scores, 0.0)
    shares = jnp.where(settings["norm_topk_prob"], shares / jnp.sum(shares, axis=-1, keepdims=True), shares)
    shares *= config.experts.routed_scaling_factor
    if w.expert_gate_up is None:
        inner = activate(product("bte,xem->btxm", h, "expert_gate")) * product("bte,xem->btxm", h, "expert_up")
    else:
        inner = block.clamped_swiglu(product("bte,xem->btxm", h, "expert_gate_up"))
    out = jnp.einsum("btxe,btx->bte", product("btxm,xme->btxe", inner, "expert_down"), shares)
    if w.shared_up is None:
        return out
    shared = (activate(h @ w.shared_gate) * (h @ w.shared_up)) @ w.shared_down
    return out + (shared if w.shared_router is None else jax.nn.sigmoid(h @ w.shared_router) * shared)


def _layers(config: LlamaConfig, weights: DecoderWeights, settings: Settings) -> dict[str, Array | None]:
    """The weights of the layers as the settings take them, those of q, k, v and o by head."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    found = {field.name: getattr(weights.layers, field.name) for field in dataclasses.fields(weights.layers)}
    every = np.arange(config.num_layers)
    dense, places = (None, every) if config.experts is None else config.experts.places(config.num_layers)
    # A layer of the other kind takes the weights of any, which are not computed with.
    own = {name: places if len(config.layers_of(name)) < len(every) else every for name in found}
    found = {
        name: each if each is None else each[jnp.asarray(own[name])[settings["layers"]]] for name, each in found.items()
    }
    found["dense"] = None if dense is None else jnp.asarray(dense)[settings["layers"]]
    for number, (one, other) in enumerate(PAIRS):
        a, b = found[one], found[other]
        if a is not None and b is not None and a.shape == b.shape:
            flag = settings["swapped"][number]
            found[one], found[other] = jnp.where(flag, b, a), jnp.where(flag, a, b)
    for number, name in enumerate(SQUARE):
        sides = (config.hidden_dim, -1) if name != "o" else (-1, config.hidden_dim)
        weight = found[name].reshape(config.num_layers, *sides)
        if weight.shape[1] == weight.shape[2]:
            weight = jnp.where(settings["transposed"][number], weight.swapaxes(1, 2), weight)
        found[name] = weight
    rotated = config.rope.rotated(size)
    pairs = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, size)])
    order = jnp.where(settings["interleaved"], pairs, np.arange(size))
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes: dict[str, tuple[int, ...]] = {
            "": (config.hidden_dim, count, size),
            "_bias": (count, size),
            "_norm": (size,),
            "_wide_norm": (count, size),
        }
        for suffix, shape in shapes.items():
            weight = found.get(name + suffix)
            if weight is not None:
                weight = weight.reshape(-1, *shape)
                weight = weight[..., settings["heads"], :] if name == "q" and len(shape) > 1 else weight
                found[name + suffix] = weight if name == "v" else weight[..., order]
    for name, shape in (("sinks", (-1, heads)), ("head_gate", (config.num_layers, -1, heads))):
        if found[name] is not None:
            found[name] = found[name].reshape(shape)[..., settings["heads"]]
    found["o"] = found["o"].reshape(-1, heads, size, config.hidden_dim)[:, settings["heads"]]
    return found


def _capped(x: Array, cap: Array) -> Array:
    """Scores with the soft cap that is an array, 0 for none."""
    return jnp.where(cap > 0, block.soft_cap(x, jnp.where(cap > 0, cap, 1.0)), x)


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
            for text, others in _layer_types(config):
                yield text, _of_layers(config, others)
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
                yield text, tuple(better if each == rope else each for each in now)
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
    kinds, which = distinct(now)
    if len(kinds) == 2:
        swapped = tuple(kinds[1 - each] for each in which)
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
        one, other = (getattr(weights.layers, name) for name in pair)
        if one is not None and other is not None and one.shape == other.shape:
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
