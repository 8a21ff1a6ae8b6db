"""The Llama family as a trainable haliax + equinox model: named axes, layers stacked and scanned."""

import dataclasses
from typing import Self

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn.scan import Stacked

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, rotary_frequencies


@dataclasses.dataclass(frozen=True)
class LlamaAxes:
    """The named axes of a model's parameters."""

    Embed: Axis
    Mlp: Axis
    KVHead: Axis
    Group: Axis
    HeadSize: Axis
    Layer: Axis

    @classmethod
    def of(cls, config: LlamaConfig) -> Self:
        """Axes of the given configuration; names are those that sharding rules use."""
        return cls(
            Embed=Axis("embed", config.hidden_dim),
            Mlp=Axis("mlp", config.intermediate_dim),
            KVHead=Axis("kv_head", config.num_kv_heads),
            Group=Axis("q_heads_per_group", config.q_heads_per_group),
            HeadSize=Axis("head_size", config.head_size),
            Layer=Axis("layer", config.num_layers),
        )


def rms_norm(x: NamedArray, weight: NamedArray, axis: Axis, epsilon: float) -> NamedArray:
    """Root-mean-square normalisation (https://arxiv.org/abs/1910.07467, eq. 4), the mean square in float32.

    Args:
        x: any axes, ``axis`` among them.
        weight: ``[axis]``.
        axis: the axis to normalise.
        epsilon: added to the mean square.

    Returns:
        The axes and dtype of ``x``.
    """
    wide = x.astype(jnp.float32)
    scale = hax.rsqrt(hax.mean(hax.square(wide), axis) + epsilon)
    return (wide * scale).astype(x.dtype) * weight


def rotate(x: NamedArray, angles: NamedArray, HeadSize: Axis) -> NamedArray:
    """Rotary embedding, half-split as in Hugging Face's ``rotate_half``.

    Args:
        x: ``[..., position, ..., head_size]``.
        angles: float32 radians ``[..., position, half_head]``.
        HeadSize: the axis whose two halves are turned against each other.

    Returns:
        The axes and dtype of ``x``.
    """
    half = angles.resolve_axis("half_head").size
    cos, sin = hax.cos(angles), hax.sin(angles)
    wide = x.astype(jnp.float32)
    first = wide[HeadSize, :half].rename({HeadSize.name: "half_head"})
    second = wide[HeadSize, half:].rename({HeadSize.name: "half_head"})
    turned = hax.concatenate("half_head", [first * cos - second * sin, second * cos + first * sin])
    return turned.rename({"half_head": HeadSize.name}).rearrange(x.axes).astype(x.dtype)


class LlamaAttention(eqx.Module):
    """Grouped-query causal self-attention (https://arxiv.org/abs/2305.13245)."""

    q: NamedArray
    k: NamedArray
    v: NamedArray
    o: NamedArray
    q_bias: NamedArray | None
    k_bias: NamedArray | None
    v_bias: NamedArray | None
    q_norm: NamedArray | None
    k_norm: NamedArray | None
    config: LlamaConfig = eqx.field(static=True)

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Random projections, zero biases, unit norms."""
        ax = LlamaAxes.of(config)
        keys = jax.random.split(key, 4)
        std, bias, norm = config.initializer_range, config.qkv_bias, config.qk_norm
        return cls(
            q=hax.random.normal(keys[0], (ax.Embed, ax.KVHead, ax.Group, ax.HeadSize)) * std,
            k=hax.random.normal(keys[1], (ax.Embed, ax.KVHead, ax.HeadSize)) * std,
            v=hax.random.normal(keys[2], (ax.Embed, ax.KVHead, ax.HeadSize)) * std,
            o=hax.random.normal(keys[3], (ax.KVHead, ax.Group, ax.HeadSize, ax.Embed)) * std,
            q_bias=hax.zeros((ax.KVHead, ax.Group, ax.HeadSize)) if bias else None,
            k_bias=hax.zeros((ax.KVHead, ax.HeadSize)) if bias else None,
            v_bias=hax.zeros((ax.KVHead, ax.HeadSize)) if bias else None,
            q_norm=hax.ones(ax.HeadSize) if norm else None,
            k_norm=hax.ones(ax.HeadSize) if norm else None,
            config=config,
        )

    def __call__(self, x: NamedArray, angles: NamedArray, mask: NamedArray) -> NamedArray:
        """Attend.

        Args:
            x: ``[batch, position, embed]``.
            angles: rotary angles ``[position, half_head]``.
            mask: bool ``[position, key_position]``, true where a query may look.

        Returns:
            ``[batch, position, embed]``.
        """
        ax = LlamaAxes.of(self.config)
        q = _add(hax.dot(x, self.q, axis=ax.Embed), self.q_bias)
        k = _add(hax.dot(x, self.k, axis=ax.Embed), self.k_bias)
        v = _add(hax.dot(x, self.v, axis=ax.Embed), self.v_bias)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm, ax.HeadSize, self.config.layer_norm_epsilon)
            k = rms_norm(k, self.k_norm, ax.HeadSize, self.config.layer_norm_epsilon)
        q = hax.auto_sharded(rotate(q, angles, ax.HeadSize))
        k = hax.auto_sharded(rotate(k, angles, ax.HeadSize)).rename({"position": "key_position"})
        v = hax.auto_sharded(v).rename({"position": "key_position"})
        scores = hax.dot(q, k, axis=ax.HeadSize, preferred_element_type=jnp.float32) * ax.HeadSize.size**-0.5
        scores = hax.where(mask, scores, jnp.finfo(jnp.float32).min)
        probabilities = hnn.softmax(scores, axis="key_position").astype(v.dtype)
        attended = hax.dot(probabilities, v, axis="key_position")
        return hax.dot(attended, self.o, axis=(ax.KVHead, ax.Group, ax.HeadSize)).rearrange(x.axes)


class LlamaMlp(eqx.Module):
    """Gated MLP, SwiGLU (https://arxiv.org/abs/2002.05202, eq. 6)."""

    gate: NamedArray
    up: NamedArray
    down: NamedArray

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Random projections."""
        ax, std = LlamaAxes.of(config), config.initializer_range
        keys = jax.random.split(key, 3)
        return cls(
            gate=hax.random.normal(keys[0], (ax.Embed, ax.Mlp)) * std,
            up=hax.random.normal(keys[1], (ax.Embed, ax.Mlp)) * std,
            down=hax.random.normal(keys[2], (ax.Mlp, ax.Embed)) * std,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """``[batch, position, embed]`` to the same."""
        inner = hnn.silu(hax.dot(x, self.gate, axis="embed")) * hax.dot(x, self.up, axis="embed")
        return hax.dot(hax.auto_sharded(inner), self.down, axis="mlp").rearrange(x.axes)


class LlamaLayer(eqx.Module):
    """One transformer layer: attention and MLP, each behind an RMSNorm and added to the stream."""

    attn_norm: NamedArray
    attention: LlamaAttention
    mlp_norm: NamedArray
    mlp: LlamaMlp

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Random projections, unit norms."""
        Embed = LlamaAxes.of(config).Embed
        attention_key, mlp_key = jax.random.split(key)
        return cls(
            attn_norm=hax.ones(Embed),
            attention=LlamaAttention.init(config, key=attention_key),
            mlp_norm=hax.ones(Embed),
            mlp=LlamaMlp.init(config, key=mlp_key),
        )

    def __call__(self, x: NamedArray, angles: NamedArray, mask: NamedArray) -> NamedArray:
        """``[batch, position, embed]`` to the same; see `LlamaAttention` for the other arguments."""
        Embed = x.resolve_axis("embed")
        epsilon = self.attention.config.layer_norm_epsilon
        # Pinning the stream to the batch axes makes XLA gather weights (FSDP) rather than split activations by embed.
        x = hax.auto_sharded(x)
        x = hax.auto_sharded(x + self.attention(rms_norm(x, self.attn_norm, Embed, epsilon), angles, mask))
        return hax.auto_sharded(x + self.mlp(rms_norm(x, self.mlp_norm, Embed, epsilon)))


class LlamaLMHeadModel(eqx.Module):
    """A Llama-family language model. Computes in the dtype of its parameters: the caller casts.

    The axis order of every parameter is that of `lockstep.models.weights`, so that the decoder reads it by reference.
    """

    embed: NamedArray
    layers: Stacked[LlamaLayer]
    final_norm: NamedArray
    lm_head: NamedArray | None
    config: LlamaConfig = eqx.field(static=True)

    @classmethod
    def init(cls, Vocab: Axis, config: LlamaConfig, *, key: jax.Array) -> Self:
        """A model with random weights, float32; the same on any mesh.

        Args:
            Vocab: the vocabulary axis, named "vocab".
            config: of the model.
            key: of the random draws.
        """
        ax, std = LlamaAxes.of(config), config.initializer_range
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        stacked = Stacked.init(ax.Layer, LlamaLayer, gradient_checkpointing=config.gradient_checkpointing)
        return cls(
            embed=hax.random.normal(embed_key, (Vocab, ax.Embed)) * std,
            layers=stacked(config, key=jax.random.split(layer_key, config.num_layers)),
            final_norm=hax.ones(ax.Embed),
            lm_head=None if config.tie_word_embeddings else hax.random.normal(head_key, (ax.Embed, Vocab)) * std,
            config=config,
        )

    @property
    def Vocab(self) -> Axis:
        """The vocabulary axis."""
        return self.embed.resolve_axis("vocab")

    def activations(self, input_ids: NamedArray) -> NamedArray:
        """Hidden states after the last norm, what the output layer reads.

        Args:
            input_ids: whole numbers ``[batch, position]`` (any other axes than position may be there, or none).

        Returns:
            ``[batch, position, embed]`` in the dtype of the parameters.

        Raises:
            ConfigError: more positions than ``config.max_seq_len``.
        """
        config, Position = self.config, input_ids.resolve_axis("position")
        if Position.size > config.max_seq_len:
            raise ConfigError(
                f"the input has {Position.size} positions; max_seq_len is {config.max_seq_len}. Shorten the input or "
                "raise model.max_seq_len."
            )
        positions = hax.arange(Position)
        KeyPosition = Position.alias("key_position")
        mask = positions.broadcast_axis(KeyPosition) >= hax.arange(KeyPosition)
        frequencies = hax.named(jnp.asarray(rotary_frequencies(config)), "half_head")
        angles = positions.astype(jnp.float32).broadcast_axis(frequencies.axes) * frequencies
        # Looking up in a table split by embed would leave the stream split by embed, and XLA would replicate it.
        x = hax.auto_sharded(hax.auto_sharded(self.embed).take("vocab", input_ids))
        x = self.layers.fold(x, angles, mask)
        return rms_norm(x, self.final_norm, x.resolve_axis("embed"), config.layer_norm_epsilon)

    def lm_head_array(self) -> NamedArray:
        """The output layer: ``[embed, vocab]``, or the embedding itself ``[vocab, embed]`` where the two are tied."""
        return self.embed if self.lm_head is None else self.lm_head

    def __call__(self, input_ids: NamedArray) -> NamedArray:
        """Logits of the next token at every position.

        Args:
            input_ids: whole numbers ``[batch, position]``.

        Returns:
            ``[batch, position, vocab]`` in the dtype of the parameters.
        """
        logits = hax.dot(self.activations(input_ids), self.lm_head_array(), axis="embed")
        return hax.auto_sharded(logits)


def _add(x: NamedArray, bias: NamedArray | None) -> NamedArray:
    return x if bias is None else x + bias
