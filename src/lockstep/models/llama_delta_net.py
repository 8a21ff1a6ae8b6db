"""The layer of the trainable model with linear attention, on named axes."""

import functools
from typing import Self

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray
from jaxtyping import Array, Float

from lockstep.models import block
from lockstep.models.config import LlamaConfig
from lockstep.models.delta_rule import DeltaGates, DeltaState, gated_delta
from lockstep.models.low_rank import Weight
from lockstep.models.named_block import weight_axes
from lockstep.models.train_ops import Train


class DeltaNet(eqx.Module):
    """Linear attention with the gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464)."""

    linear_qkvz: Weight
    linear_gates: NamedArray
    linear_conv_q: NamedArray
    linear_conv_k: NamedArray
    linear_conv_v: NamedArray
    linear_decay: NamedArray
    linear_decay_bias: NamedArray
    linear_norm: NamedArray
    linear_o: Weight
    config: LlamaConfig = eqx.field(static=True)

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Return random projections and decays, and a unit norm."""
        axes, std, keys = functools.partial(weight_axes, config), config.initializer_range, jax.random.split(key, 7)
        random = ("linear_qkvz", "linear_gates", "linear_conv_q", "linear_conv_k", "linear_conv_v")
        return cls(
            **{name: hax.random.normal(own, axes(name)) * std for name, own in zip(random, keys[:5], strict=True)},
            linear_decay=hax.log(hax.random.uniform(keys[5], axes("linear_decay"), minval=0.01, maxval=16.0)),
            linear_decay_bias=hax.ones(axes("linear_decay_bias")),
            linear_norm=hax.ones(axes("linear_norm")),
            linear_o=hax.random.normal(keys[6], axes("linear_o")) * std,
            config=config,
        )

    def attend(
        self,
        ops: Train,
        segment_ids: NamedArray | None,
        layer_kind: NamedArray | None,
        inputs: Array,
        taps: Array,
        gates: DeltaGates,
    ) -> Float[Array, "row position key_head group value"]:
        """Return what positions read of their documents' past, see `lockstep.models.delta_rule.gated_delta`.

        Args:
            segment_ids: The document of each position, which knows nothing of others; None: a row is one document.
        """
        *rows, Position = ops.rows
        of = self.config.linear_attention
        assert of is not None

        def flat(x: Array) -> Array:
            return x.reshape(-1, Position.size, *x.shape[len(rows) + 1 :])

        inputs, begins = flat(inputs), None
        if segment_ids is not None:
            begins = block.document_starts(flat(segment_ids.rearrange(ops.rows).array))
        start = DeltaState.zeros(of, len(inputs), of.key_heads, inputs.dtype)
        out, _ = gated_delta(of, inputs, taps, DeltaGates(*map(flat, gates)), start, begins=begins)
        return out.reshape(*(axis.size for axis in ops.rows), *out.shape[2:])
