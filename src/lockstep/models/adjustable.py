"""A forward pass whose settings are numbers that it is given: one compiled program tries any of them on a model.

`lockstep.models.check_reader` finds with it which setting or weight a reader has wrong. Its attention, in float32, is
its own; the rest is that of `lockstep.models.block`.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lockstep.models import block
from lockstep.models.attention import NO_WINDOW
from lockstep.models.config import LlamaConfig, layer_kinds, rotary_frequencies
from lockstep.models.weights import DecoderWeights, LayerWeights

ACTIVATIONS: Final = tuple(block.ACTIVATIONS)
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
            embed_scale=np.float32(config.embed_scale or 1.0),
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

    def norm(x: Array, weight: Array | None) -> Array:
        return block.rms_norm(x, weight, settings.epsilon, offset=settings.norm_offset)

    def layer(x: Array, inputs: Any) -> tuple[Array, None]:
        w, frequencies, window = inputs
        inner = _Layer(config, w, frequencies, window, settings)
        return block.layer(x, inner.attend, inner.mlp, norm, w), None

    x = norm(settings.embed_scale * weights.embed[ids], weights.embed_norm)
    x, _ = jax.lax.scan(layer, x, (layers, settings.frequencies, settings.window))
    head = weights.embed.T
    if weights.lm_head is not None:
        head = jnp.where(settings.tied, head, weights.lm_head)
    return _capped(norm(x, weights.final_norm) @ head, settings.logit_cap)


def _swapped(layers: LayerWeights, swapped: Array) -> LayerWeights:
    for number, (one, other) in enumerate(PAIRS):
        a, b = getattr(layers, one), getattr(layers, other)
        if a is not None and b is not None and a.shape == b.shape:
            flag = swapped[number]
            changed: dict[str, Any] = {one: jnp.where(flag, b, a), other: jnp.where(flag, a, b)}
            layers = dataclasses.replace(layers, **changed)
    return layers


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The attention and MLP of one layer."""

    config: LlamaConfig
    w: Any
    frequencies: Array
    window: Array
    settings: Settings

    def attend(self, x: Array) -> Array:
        batch, length, _ = x.shape
        config, settings, w = self.config, self.settings, self.w
        kv, group, head = config.num_kv_heads, config.q_heads_per_group, config.head_size

        def project(name: str, heads: int) -> Array:
            out = (x @ self._flat(name)).reshape(batch, length, heads, head)
            bias = getattr(w, f"{name}_bias")
            return out if bias is None else out + bias.reshape(heads, head)

        def norm(x: Array, weight: Array | None, shape: tuple[int, ...]) -> Array:
            weight = None if weight is None else weight.reshape(shape)
            return block.rms_norm(x, weight, settings.epsilon, offset=settings.norm_offset)

        q, k, v = project("q", kv * group)[:, :, settings.heads], project("k", kv), project("v", kv)
        q, k = norm(q, w.q_norm, (head,)), norm(k, w.k_norm, (head,))
        q, k = norm(q, w.q_wide_norm, (kv * group, head)), norm(k, w.k_wide_norm, (kv, head))
        position = jnp.arange(length)
        angles = block.rope_angles(position, [self.frequencies])[:, None]
        q, k = (self._rotated(each, jnp.cos(angles), jnp.sin(angles)) for each in (q, k))
        q = q.reshape(batch, length, kv, group, head)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * settings.attention_scale
        scores = _capped(scores, settings.attention_cap)
        distance = position[:, None] - position
        scores = jnp.where((distance >= 0) & (distance < self.window), scores, -jnp.inf)
        out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v).reshape(batch, length, kv * group, head)
        # The output layer has its heads in the order in which the projection of queries has them.
        out = jnp.zeros_like(out).at[:, :, settings.heads].set(out)
        return out.reshape(batch, length, -1) @ self._flat("o")

    def mlp(self, x: Array) -> Array:
        w, up = self.w, x @ self.w.up
        if w.gate is None:
            inner = block.xielu(up, w.xielu_p, w.xielu_n, w.xielu_beta, w.xielu_eps)
        else:
            functions = list(block.ACTIVATIONS.values())
            inner = jax.lax.switch(self.settings.activation, functions, x @ w.gate) * up
        out: Array = inner @ w.down
        return out

    def _flat(self, name: str) -> Array:
        """Returns a weight as ``[inputs, outputs]``, transposed where the settings say so."""
        weight, embed = getattr(self.w, name), self.config.hidden_dim
        weight = weight.reshape(embed, -1) if name != "o" else weight.reshape(-1, embed)
        square = weight.shape[0] == weight.shape[1]
        return jnp.where(self.settings.transposed[SQUARE.index(name)], weight.T, weight) if square else weight

    def _rotated(self, x: Array, cos: Array, sin: Array) -> Array:
        halves = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)  # of pairs of neighbours
        pairs = jnp.stack(jnp.split(block.rotate(halves, cos, sin), 2, axis=-1), axis=-1).reshape(x.shape)
        return jnp.where(self.settings.interleaved, pairs, block.rotate(x, cos, sin))


def _capped(x: Array, cap: Array) -> Array:
    """Returns scores with the soft cap that is an array, 0 for none."""
    return jnp.where(cap > 0, block.soft_cap(x, jnp.where(cap > 0, cap, 1.0)), x)
