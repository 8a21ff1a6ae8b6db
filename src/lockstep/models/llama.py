"""The Llama family as a trainable haliax + equinox model, with named axes and scanned layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn.scan import Stacked
from jaxtyping import Array

from lockstep.errors import ConfigError
from lockstep.models import block
from lockstep.models.attention import SplitPositions
from lockstep.models.config import LlamaConfig
from lockstep.models.experts import RouterSums
from lockstep.models.layer_kinds import distinct, layer_kinds
from lockstep.models.layers import feed_forward, first_stream, last_stream, layer
from lockstep.models.llama_attention import LlamaAttention, MixedAttention
from lockstep.models.llama_delta_net import DeltaNet
from lockstep.models.llama_mlp import EngineRouting, LlamaExperts, LlamaMlp, MixedLayers, MixedMlps
from lockstep.models.named_block import (
    document_positions,
    float32_logits,
    look_up,
    neutral,
    norm_gates,
    rotary_angles,
    weight_axes,
)
from lockstep.models.remat import scan_policy
from lockstep.models.train_ops import Train
from lockstep.models.weights import STACKED, LayerWeights


class LlamaLayer(eqx.Module):
    """One transformer layer: attention and MLP, each with its RMSNorms and a residual connection."""

    attn_norm: NamedArray | None
    attn_norm_down: NamedArray | None
    attn_norm_up: NamedArray | None
    attention: LlamaAttention | DeltaNet | MixedAttention | None
    """Those of all layers in `MixedLayers`; ``mlp`` too."""
    attn_post_norm: NamedArray | None
    mlp_norm: NamedArray | None
    mlp_norm_down: NamedArray | None
    mlp_norm_up: NamedArray | None
    mlp: LlamaMlp | LlamaExperts | MixedMlps | None
    mlp_post_norm: NamedArray | None
    layer_scalar: NamedArray | None

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Return random projections and unit norms."""
        attention_key, mlp_key = jax.random.split(key)
        names = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
        norms = {name: neutral(config, name) if name in config.variant.norms else None for name in names}
        mlp, mixed = LlamaMlp if config.experts is None else LlamaExperts, config.mixed_parts
        return cls(
            **norms,
            **norm_gates(config, attention_key, "attn_norm", norms["attn_norm"] is not None),
            **norm_gates(config, mlp_key, "mlp_norm", norms["mlp_norm"] is not None),
            attention=None if "attention" in mixed else LlamaAttention.init(config, key=attention_key),
            mlp=None if "mlp" in mixed else mlp.init(config, key=mlp_key),
            layer_scalar=hax.ones(weight_axes(config, "layer_scalar")) if config.layer_scalars else None,
        )

    def __call__(
        self,
        x: NamedArray,
        angles: NamedArray,
        segment_ids: NamedArray | None,
        layer_kind: NamedArray | None = None,
        engine: EngineRouting | None = None,
        known: NamedArray | None = None,
        counted: NamedArray | None = None,
    ) -> tuple[NamedArray, RouterSums | None]:
        """Map ``[batch, position, embed]`` to the same axes.

        Args:
            x: The residual stream; instead of ``batch`` any axes, or none.
            angles: Those of `rotary_angles`.
            segment_ids: See `LlamaAttention.attend`; ``layer_kind`` too.
            engine: See `LlamaExperts`; ``counted`` too.
            known: The result where it is known but for rounding: nothing is computed until there is a gradient.

        Returns:
            The residual stream, and the sums of the router; None where there are no experts.
        """
        attention = self.attention
        assert isinstance(attention, LlamaAttention | DeltaNet)
        ops = Train.of(attention.config, x)
        angles = angles if layer_kind is None else angles["layer_kind", layer_kind]
        parts: dict[str, Any] = {**dict.fromkeys("kvo"), **vars(self), **vars(attention), **vars(self.mlp)}
        w = LayerWeights(**{name: weight for name, weight in parts.items() if name in STACKED})
        axes = (*ops.rows, x.resolve_axis("embed"))

        def experts(h: Array, of_router: Array | None) -> tuple[Array, RouterSums]:
            assert isinstance(self.mlp, LlamaExperts)
            routed_by = None if of_router is None else hax.named(of_router, axes)
            own_counted = segment_ids if counted is None else counted
            answers, sums = self.mlp(hax.named(h, axes), own_counted, engine, routed_by)
            return answers.array, sums

        stream, sums = layer(
            ops, ops.config, w, x.rearrange(axes).array, ops.rotary(angles),
            functools.partial(attention.attend, ops, segment_ids, layer_kind),
            lambda h: feed_forward(ops, ops.config, w, h, experts),
        )  # fmt: skip
        if known is not None:
            stream = value_with_gradient_of(known.rearrange(axes).array, stream)
        return hax.named(stream, axes).rearrange(x.axes), sums


class LlamaLMHeadModel(eqx.Module):
    """A Llama-family language model. It computes in the dtype of its parameters; the caller casts them.

    The axis order of every parameter is that of `lockstep.models.weights`, so that the decoder reads it by reference.

    Example:
        >>> tokens = hax.ones((hax.Axis("batch", 2), hax.Axis("position", 8)), dtype=int)
        >>> logits = jax.eval_shape(model, tokens)
    """

    embed: NamedArray
    embed_norm: NamedArray | None
    embed_norm_down: NamedArray | None
    embed_norm_up: NamedArray | None
    layers: Stacked[LlamaLayer] | MixedLayers
    final_norm: NamedArray
    final_norm_down: NamedArray | None
    final_norm_up: NamedArray | None
    lm_head: NamedArray | None
    config: LlamaConfig = eqx.field(static=True)

    @classmethod
    def init(cls, Vocab: Axis, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Return a model with random float32 weights, the same on any mesh.

        Args:
            Vocab: The vocabulary axis, named "vocab".
        """
        Embed, std = Axis("embed", config.hidden_dim), config.initializer_range
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        policy = scan_policy(config.gradient_checkpointing)
        stacked = Stacked.init(Axis("layer", config.num_layers), LlamaLayer, gradient_checkpointing=policy)
        layers: Stacked[LlamaLayer] | MixedLayers = stacked(config, key=jax.random.split(layer_key, config.num_layers))
        if mixed := config.mixed_parts:
            parts: dict[str, Any] = {}
            if "mlp" in mixed:
                parts["mlp"] = MixedMlps.init(config, key=jax.random.fold_in(layer_key, 1))
            if "attention" in mixed:
                parts["attention"] = MixedAttention.init(config, key=jax.random.fold_in(layer_key, 2))
            layers = MixedLayers(dataclasses.replace(layers.stacked, **parts), config)
        return cls(
            **norm_gates(config, embed_key, "embed_norm", config.variant.embed_norm),
            **norm_gates(config, head_key, "final_norm"),
            embed=hax.random.normal(embed_key, (Vocab, Embed)) * std,
            embed_norm=neutral(config, "embed_norm") if config.variant.embed_norm else None,
            layers=layers,
            final_norm=neutral(config, "final_norm"),
            lm_head=None if config.tie_word_embeddings else hax.random.normal(head_key, (Embed, Vocab)) * std,
            config=config,
        )

    @property
    def Vocab(self) -> Axis:
        """The vocabulary axis."""
        return self.embed.resolve_axis("vocab")

    def activations(self, input_ids: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
        """Return the hidden states after the last norm, which the output layer reads.

        Args:
            input_ids: The integer token ids ``[batch, position]``; instead of ``batch`` any axes, or none.
            segment_ids: The document of each token, where a row is packed with several, each in one piece: integers
                with the axes of ``input_ids``. Positions restart with each document, and a token attends to its own
                document alone. None: a row is one document.

        Returns:
            The hidden states ``[batch, position, embed]`` in the dtype of the parameters.

        Raises:
            ConfigError: There are more positions than ``config.max_seq_len``.
        """
        return self.activations_and_router(input_ids, segment_ids)[0]

    def activations_and_router(
        self,
        input_ids: NamedArray,
        segment_ids: NamedArray | None = None,
        engine: EngineRouting | None = None,
        known: NamedArray | None = None,
        counted: NamedArray | None = None,
    ) -> tuple[NamedArray, RouterSums | None]:
        """Return what `activations` does, and the sums of the router of each layer; None where there are no experts.

        Padding, whose segment id is 0, is not in the sums.

        Args:
            engine: The experts that an engine chose for the tokens.
            known: The residual stream after each layer ``[layer, batch, position, embed]``, see `LlamaLayer`.
            counted: Whether each token is in the sums, with the axes of ``input_ids``; None: as the segment ids say.
        """
        config, Position = self.config, input_ids.resolve_axis("position")
        if Position.size > config.max_seq_len:
            raise ConfigError(
                f"the input has {Position.size} positions; max_seq_len is {config.max_seq_len}. Shorten the input or "
                "raise model.max_seq_len."
            )
        positions, split = document_positions(Position, segment_ids), SplitPositions.of(Position)
        if split is not None:
            if config.experts is not None or config.linear_attention is not None:
                part = "experts" if config.experts is not None else "linear attention"
                raise ConfigError(split.refusal(f"a model with {part}"))
            input_ids, positions = split.split(input_ids), split.split(positions)
            segment_ids = None if segment_ids is None else split.split(segment_ids)
        angles = rotary_angles(config, positions)
        kinds, indices = distinct(layer_kinds(config))
        layer_kind = None if len(kinds) == 1 else hax.named(jnp.asarray(indices), "layer")
        x = look_up(self.embed, input_ids, split)
        layers = self.layers.scan_via(LlamaLayer.__call__)
        x = self._applied(first_stream, x)
        known_and_counted = () if known is None and counted is None else (known, counted)
        x, sums = layers(x, angles, segment_ids, layer_kind, engine, *known_and_counted)
        if split is not None:
            x = x.rearrange(("batch", "position", "embed"))
            x = hax.named(split.restore(x.array, hax.partitioning.pspec_for_axis(x.axes[:1])), x.axes)
        return self._applied(last_stream, x), sums

    def _applied(self, end: Callable[[Train, LlamaConfig, Any, Array], Array], x: NamedArray) -> NamedArray:
        """The stream after `first_stream` or `last_stream`."""
        rows = x.rearrange((..., "embed"))
        return hax.named(end(Train.of(self.config, x), self.config, self, rows.array), rows.axes)

    def lm_head_array(self) -> NamedArray:
        """Return the output layer ``[embed, vocab]``, or the embedding ``[vocab, embed]`` where the two are tied."""
        return self.embed if self.lm_head is None else self.lm_head

    @property
    def logit_soft_cap(self) -> float | None:
        """The soft cap of the logits of the output layer; None for none."""
        return self.config.variant.logit_soft_cap

    def __call__(self, input_ids: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
        """Return the logits of the next token at every position.

        Args:
            input_ids: The integer token ids ``[batch, position]``.
            segment_ids: The document of each token, as in `activations`.

        Returns:
            The logits ``[batch, position, vocab]`` in float32.
        """
        return self.logits(self.activations(input_ids, segment_ids))

    def logits(self, activations: NamedArray) -> NamedArray:
        """Return the logits of hidden states, accumulated and kept in float32 whatever the dtype of the parameters.

        Rounded to bfloat16, a logit of 10 would be off by up to 0.03, and a log-probability with it.

        Args:
            activations: The hidden states that `activations` returns, or some of their positions.
        """
        logits = float32_logits(activations, self.lm_head_array())
        return hax.auto_sharded(hax.named(block.soft_cap(logits.array, self.logit_soft_cap), logits.axes))


@jax.custom_vjp
def value_with_gradient_of(value: jax.Array, differentiated: jax.Array) -> jax.Array:
    """Return ``value``, with the gradient of ``other``, which is the same but for rounding."""
    return value


value_with_gradient_of.defvjp(
    lambda value, other: (value, None), lambda _, gradient: (jnp.zeros_like(gradient), gradient)
)


def attention_and_mlp(layer: LlamaLayer) -> tuple[Any, ...]:
    """The modules that have the weights of a layer, or of stacked ones, but for norms of the residual stream."""
    attention, mlp = layer.attention, layer.mlp
    return (
        *(vars(attention).values() if isinstance(attention, MixedAttention) else (attention,)),
        *((mlp.dense, mlp.sparse) if isinstance(mlp, MixedMlps) else (mlp,)),
    )
