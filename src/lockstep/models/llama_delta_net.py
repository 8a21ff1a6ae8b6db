"""The layer of the trainable model with linear attention, on named axes."""

from typing import Self

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from jaxtyping import Array, Float

from lockstep.models import block
from lockstep.models.config import LlamaConfig
from lockstep.models.delta_rule import DeltaGates, DeltaState, gated_delta
from lockstep.models.low_rank import Weight
from lockstep.models.named_block import LlamaAxes
from lockstep.models.train_ops import Train


class DeltaNet(eqx.Module):
    """Linear attention with the gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464)."""

    linear_qkvz: Weight | None
    linear_gates: NamedArray | None
    linear_q: Weight | None
    linear_k: Weight | None
    linear_v: Weight | None
    linear_z: Weight | None
    linear_b: NamedArray | None
    linear_a: NamedArray | None
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
        ax, std, keys = LlamaAxes.of(config), config.initializer_range, jax.random.split(key, 7)
        heads, split = (ax.KeyHead, ax.ValueGroup), config.variant.split_delta

        def part(number: int, has: bool, *axes: Axis) -> NamedArray | None:
            own = keys[number] if number < 2 else jax.random.fold_in(key, number)
            return hax.random.normal(own, (ax.Embed, *axes)) * std if has else None

        return cls(
            linear_qkvz=part(0, not split, ax.KeyHead, ax.Qkvz),
            linear_gates=part(1, not split, ax.KeyHead, ax.Gates),
            linear_q=part(0, split, ax.KeyHead, ax.Key),
            linear_k=part(7, split, ax.KeyHead, ax.Key),
            linear_v=part(8, split, *heads, ax.Value),
            linear_z=part(9, split, *heads, ax.Value),
            linear_b=part(1, split, *heads),
            linear_a=part(10, split, *heads),
            linear_conv_q=hax.random.normal(keys[2], (ax.KeyHead, ax.Key, ax.One, ax.Width)) * std,
            linear_conv_k=hax.random.normal(keys[3], (ax.KeyHead, ax.Key, ax.One, ax.Width)) * std,
            linear_conv_v=hax.random.normal(keys[4], (*heads, ax.Value, ax.One, ax.Width)) * std,
            linear_decay=hax.log(hax.random.uniform(keys[5], heads, minval=0.01, maxval=16.0)),
            linear_decay_bias=hax.ones(heads),
            linear_norm=hax.ones(ax.Value),
            linear_o=hax.random.normal(keys[6], (*heads, ax.Value, ax.Embed)) * std,
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
