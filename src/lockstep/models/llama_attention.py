"""Attention of the trainable model, on named axes."""

import dataclasses
import functools
from typing import ClassVar, Self

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray
from haliax.partitioning import physical_axis_name
from jaxtyping import Array, Float

from lockstep.models.attention import CausalAttention, HeadArrays, SplitPositions, self_attention
from lockstep.models.config import LlamaConfig
from lockstep.models.layer_kinds import distinct, layer_kinds
from lockstep.models.llama_delta_net import DeltaNet
from lockstep.models.llama_mlp import stack
from lockstep.models.low_rank import Weight
from lockstep.models.named_block import neutral, weight_axes
from lockstep.models.train_ops import Train
from lockstep.models.weight_sizes import absent_weights
from lockstep.models.weights import WEIGHT_AXES, WIDE


class LlamaAttention(eqx.Module):
    """Grouped-query causal self-attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245), or with a latent."""

    q: Weight | None
    gated_q: Weight | None
    k: Weight | None
    v: Weight | None
    q_a: Weight | None
    q_a_norm: NamedArray | None
    q_b: Weight | None
    kv_a: Weight | None
    kv_a_norm: NamedArray | None
    kv_b: Weight | None
    o: Weight
    q_bias: NamedArray | None
    k_bias: NamedArray | None
    v_bias: NamedArray | None
    o_bias: NamedArray | None
    sinks: NamedArray | None
    head_gate: NamedArray | None
    q_norm: NamedArray | None
    k_norm: NamedArray | None
    q_wide_norm: NamedArray | None
    k_wide_norm: NamedArray | None
    config: LlamaConfig = eqx.field(static=True)
    kind: ClassVar[str] = "full"

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Return random projections, zero biases and sinks, and unit norms."""
        keys, absent = jax.random.split(key, 4), absent_weights(config)
        random = {"gated_q": 0} | {name: number for number, name in enumerate((*"qkvo", "q_a", "q_b", "kv_a", "kv_b"))}
        random |= {WIDE[name]: random[name] for name in "qkvo"}

        def weight(name: str) -> NamedArray:
            if (number := random.get(name)) is not None:
                own = keys[number] if number < 4 else jax.random.fold_in(key, number)
                return hax.random.normal(own, weight_axes(config, name)) * config.initializer_range
            return neutral(config, name) if name.endswith("norm") else hax.zeros(weight_axes(config, name))

        # In the order of the fields: hosts whose sets have another order would trace another program.
        names = [field.name for field in dataclasses.fields(cls) if field.name in WEIGHT_AXES]
        weights = {name: weight(name) for name in cls.__annotations__ if name in names and name not in absent}
        return cls(**dict.fromkeys(names) | weights, config=config.of_attention(cls.kind))

    def attend(
        self, ops: Train, segment_ids: NamedArray | None, layer_kind: NamedArray | None, q: Array, k: Array, v: Array
    ) -> Float[Array, "row position kv_head group head"]:
        """The values that queries attend to, with all axes of rows but the position in one.

        Args:
            segment_ids: The document of each position, which attends to no other; None: a row is one document.
            layer_kind: Which of the model's distinct kinds of layers this one is; None where all are of one kind.
            q: The queries ``[*row, position, kv_head, group, head]``; ``k`` and ``v`` are without ``group``.
        """
        *rows, Position = ops.rows

        def attend(window: int | None, arrays: HeadArrays) -> Array:
            scores = CausalAttention(
                scale=q.shape[-1] ** -0.5, sliding_window=window, soft_cap=self.config.variant.attention_soft_cap
            )
            return self_attention(
                arrays,
                scores,
                backend=self.config.attn_backend,
                split=SplitPositions.of(Position),
                batch_axes=physical_axis_name(rows[0]) if rows else None,
                head_axes=physical_axis_name("kv_head"),
            )

        documents = None if segment_ids is None else segment_ids.rearrange(ops.rows).array.reshape(-1, Position.size)
        q, k, v = (x.reshape(-1, *x.shape[len(rows) :]) for x in (q, k, v))
        arrays = HeadArrays(q, k, v, documents, ops.array(self.sinks))
        windows = [kind.window for kind in distinct(layer_kinds(self.config))[0]]
        if layer_kind is None or len(set(windows)) == 1:
            return attend(windows[0], arrays)
        # The kernel's blocks depend on the window, so each has a branch.
        branches = [functools.partial(attend, window) for window in windows]
        attended: Array = jax.lax.switch(layer_kind.array, branches, arrays)
        return attended


class WideAttention(LlamaAttention):
    """Attention with heads of another size than those of most layers; the weights of those are None."""

    wide_q: Weight
    wide_k: Weight
    wide_v: Weight | None
    wide_o: Weight
    wide_q_norm: NamedArray | None
    wide_k_norm: NamedArray | None
    kind: ClassVar[str] = "wide"


class MixedAttention(eqx.Module):
    """The attention of the layers of each kind, stacked."""

    full: LlamaAttention
    linear: DeltaNet | None = None
    wide: WideAttention | None = None

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Return random projections."""
        classes = {"full": LlamaAttention, "linear": DeltaNet, "wide": WideAttention}
        layers: dict[str, list[int]] = {}
        for number, kind in enumerate(config.attention_kinds):
            layers.setdefault(kind, []).append(number)
        return cls(**{kind: stack(classes[kind], config, own, key=key) for kind, own in layers.items()})
