"""A forward pass whose settings are numbers that it is given: one compiled program tries any of them on a model.

`lockstep.models.check_reader` finds with it which setting or weight a reader has wrong. `LlamaLMHeadModel` computes the
same with the settings of a `LlamaConfig`, to be trained; so does the engine, to decode.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lockstep.attention import NO_WINDOW
from lockstep.models.config import LlamaConfig, rotary_frequencies
from lockstep.models.layer_kinds import layer_kinds
from lockstep.models.weights import DecoderWeights, LayerWeights

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu")
PAIRS: Final = (
    ("gate", "up"),
    ("k", "v"),
    ("attn_norm", "mlp_norm"),
    ("attn_post_norm", "mlp_post_norm"),
    ("attn_post_norm", "mlp_norm"),
    ("q_norm", "k_norm"),
)
"""Weights of one shape that a reader can take for each other."""
SQUARE: Final = ("q", "k", "v", "o")
"""Weights that can be square, so that their transpose has the right shape too."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a forward pass, each an array so that another value needs no other program.

    Args:
        frequencies: The rotary frequencies of each layer in radians per token ``[layer, half_head]``.
        interleaved: Whether element ``2 i`` of a head is rotated with ``2 i + 1``, not ``i`` with ``i + half``.
        epsilon: The number added to the mean square in RMSNorm.
        norm_offset: The number added to the weight of RMSNorm: 1 in Gemma.
        embed_scale: The factor of the embedding.
        attention_scale: The factor of attention scores.
        attention_cap: The soft cap of attention scores; 0 for none.
        logit_cap: The soft cap of logits; 0 for none.
        window: The number of positions that a query of each layer attends to ``[layer]``.
        activation: The position of the activation in `ACTIVATIONS`.
        tied: Whether the output layer is the embedding.
        heads: The query head of the model that the decoder's i-th head is ``[heads]``.
        layers: The layer of the model that the decoder's i-th layer is ``[layer]``.
        swapped: Whether the two weights of each of `PAIRS` are swapped.
        transposed: Whether each of `SQUARE` is transposed.
    """

    frequencies: Any
    interleaved: Any
    epsilon: Any
    norm_offset: Any
    embed_scale: Any
    attention_scale: Any
    attention_cap: Any
    logit_cap: Any
    window: Any
    activation: Any
    tied: Any
    heads: Any
    layers: Any
    swapped: Any
    transposed: Any

    @classmethod
    def of(cls, config: LlamaConfig) -> "Settings":
        """The settings that a configuration says, as NumPy arrays."""
        variant, layers, kinds = config.variant, config.num_layers, layer_kinds(config)
        scale = variant.attention_scale
        known = variant.activation in ACTIVATIONS
        return cls(
            frequencies=np.stack([rotary_frequencies(config, kind.rope) for kind in kinds]),
            interleaved=np.bool_(False),
            epsilon=np.float32(config.layer_norm_epsilon),
            norm_offset=np.float32(variant.norm_plus_one),
            embed_scale=np.float32(variant.embed_scale or 1.0),
            attention_scale=np.float32(config.head_size**-0.5 if scale is None else scale),
            attention_cap=np.float32(variant.attention_soft_cap or 0.0),
            logit_cap=np.float32(variant.logit_soft_cap or 0.0),
            window=np.array([kind.window or NO_WINDOW for kind in kinds], np.int32),
            activation=np.int32(ACTIVATIONS.index(variant.activation) if known else 0),
            tied=np.bool_(config.tie_word_embeddings),
            heads=np.arange(config.num_heads, dtype=np.int32),
            layers=np.arange(layers, dtype=np.int32),
            swapped=np.zeros(len(PAIRS), bool),
            transposed=np.zeros(len(SQUARE), bool),
        )


def adjustable_logits(
    config: LlamaConfig, weights: DecoderWeights, ids: Int[Array, "batch position"], settings: Settings
) -> Float[Array, "batch position vocab"]:
    """The logits of a model in float32, with settings that need not be those of its configuration.

    Args:
        config: The configuration, for the sizes alone.
        weights: The weights; computed with in float32.
        ids: The token ids.
        settings: The settings.
    """
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    layers: LayerWeights = jax.tree.map(lambda leaf: leaf[settings.layers], weights.layers)
    layers = _swapped(layers, settings.swapped)
    x = settings.embed_scale * weights.embed[ids]
    x = _norm(x, weights.embed_norm, settings)

    def layer(x: Array, inputs: Any) -> tuple[Array, None]:
        w, frequencies, window = inputs
        attended = _attend(config, w, _norm(x, w.attn_norm, settings), frequencies, window, settings)
        x = x + _norm(attended, w.attn_post_norm, settings)
        out = _mlp(w, _norm(x, w.mlp_norm, settings), settings)
        return x + _norm(out, w.mlp_post_norm, settings), None

    x, _ = jax.lax.scan(layer, x, (layers, settings.frequencies, settings.window))
    head = weights.embed.T
    if weights.lm_head is not None:
        head = jnp.where(settings.tied, head, weights.lm_head)
    return _capped(_norm(x, weights.final_norm, settings) @ head, settings.logit_cap)


def _swapped(layers: LayerWeights, swapped: Array) -> LayerWeights:
    for number, (one, other) in enumerate(PAIRS):
        a, b = getattr(layers, one), getattr(layers, other)
        if a is not None and b is not None and a.shape == b.shape:
            flag = swapped[number]
            changed: dict[str, Any] = {one: jnp.where(flag, b, a), other: jnp.where(flag, a, b)}
            layers = dataclasses.replace(layers, **changed)
    return layers


def _norm(x: Array, weight: Array | None, settings: Settings) -> Array:
    """RMSNorm over as many last axes as the weight has."""
    if weight is None:
        return x
    axes = tuple(range(-weight.ndim, 0))
    mean = jnp.mean(jnp.square(x), axis=axes, keepdims=True)
    return x * jax.lax.rsqrt(mean + settings.epsilon) * (weight + settings.norm_offset)


def _attend(config: LlamaConfig, w: Any, x: Array, frequencies: Array, window: Array, settings: Settings) -> Array:
    batch, length, embed = x.shape
    kv, group, head = config.num_kv_heads, config.q_heads_per_group, config.head_size

    def flat(name: str) -> Array:
        """``[inputs, outputs]``, transposed where the settings say so."""
        weight = getattr(w, name)
        weight = weight.reshape(embed, -1) if name != "o" else weight.reshape(-1, embed)
        square = weight.shape[0] == weight.shape[1]
        return jnp.where(settings.transposed[SQUARE.index(name)], weight.T, weight) if square else weight

    def project(name: str, heads: int) -> Array:
        out = (x @ flat(name)).reshape(batch, length, heads, head)
        bias = getattr(w, f"{name}_bias")
        return out if bias is None else out + bias.reshape(heads, head)

    q, k, v = project("q", kv * group)[:, :, settings.heads], project("k", kv), project("v", kv)
    q, k = _norm(q, w.q_norm, settings), _norm(k, w.k_norm, settings)
    if w.q_wide_norm is not None:
        q = _norm(q, w.q_wide_norm.reshape(kv * group, head), settings)
        k = _norm(k, w.k_wide_norm.reshape(kv, head), settings)
    position = jnp.arange(length)
    angles = position[:, None].astype(jnp.float32) * frequencies
    q, k = (_rotated(each, angles, settings.interleaved) for each in (q, k))
    q = q.reshape(batch, length, kv, group, head)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * settings.attention_scale
    scores = _capped(scores, settings.attention_cap)
    distance = position[:, None] - position
    scores = jnp.where((distance >= 0) & (distance < window), scores, -jnp.inf)
    out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v).reshape(batch, length, kv * group, head)
    # The output layer has its heads in the order in which the projection of queries has them.
    out = jnp.zeros_like(out).at[:, :, settings.heads].set(out)
    return out.reshape(batch, length, -1) @ flat("o")


def _rotated(x: Array, angles: Array, interleaved: Array) -> Array:
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def rotate(first: Array, second: Array) -> tuple[Array, Array]:
        return first * cos - second * sin, second * cos + first * sin

    halves = jnp.concatenate(rotate(*jnp.split(x, 2, axis=-1)), axis=-1)
    pairs = jnp.stack(rotate(x[..., 0::2], x[..., 1::2]), axis=-1).reshape(x.shape)
    return jnp.where(interleaved, pairs, halves)


def _mlp(w: Any, x: Array, settings: Settings) -> Array:
    inner = x @ w.up
    if w.gate is not None:
        functions = [jax.nn.silu, lambda a: jax.nn.gelu(a, approximate=False), jax.nn.gelu, jax.nn.relu]
        inner = jax.lax.switch(settings.activation, functions, x @ w.gate) * inner
    else:
        beta, eps = w.xielu_beta, w.xielu_eps
        p, n = jax.nn.softplus(w.xielu_p), beta + jax.nn.softplus(w.xielu_n)
        negative = (jnp.expm1(jnp.minimum(inner, eps)) - inner) * n + beta * inner
        inner = jnp.where(inner > 0, p * inner * inner + beta * inner, negative)
    out: Array = inner @ w.down
    return out


def _capped(x: Array, cap: Array) -> Array:
    """The soft cap of scores, where it is not 0."""
    return jnp.where(cap > 0, cap * jnp.tanh(x / jnp.where(cap > 0, cap, 1.0)), x)
