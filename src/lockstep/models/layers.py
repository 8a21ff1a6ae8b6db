"""The layer of a transformer, written once: attention, MLP and what is around them, on plain arrays.

Training, decoding, ``numerics: exact`` and the search of `lockstep.models.check_reader` run these lines, each with its
own `Ops` for the few operations in which they differ.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lockstep.models import block
from lockstep.models.block import Rotary
from lockstep.models.config import LlamaConfig
from lockstep.models.delta_rule import DeltaGates
from lockstep.models.latent import NORM_EPSILON, Latent, LatentQueries
from lockstep.models.weights import LayerWeights, as_full

type Attend = Callable[[Array, Array, Array], Array]
"""Takes queries ``[*row, kv_head, group, head]``, keys and values ``[*row, kv_head, head]``; returns for each query the
values that it attends to, in any shape that is as large."""
type Recur = Callable[[Array, Array, DeltaGates], Array]
"""Takes the inputs ``[*row, key_head, qkv]`` and the taps of `lockstep.models.delta_rule.gated_delta`, and the gates;
returns what positions read, with the axes of rows."""
type FeedForward = Callable[[Array], tuple[Array, Any]]
"""Takes the stream after the norm; returns what the MLP or the experts answer, and whatever else is known of these."""
type OfExperts = Callable[[Array, Array | None], tuple[Array, Any]]
"""Takes the inputs of experts, and those of their router where these differ; returns the same as `FeedForward`."""


class Ops(Protocol):
    """Operations that depend on where a model runs: on devices that split a weight, and on the order of sums.

    A weight is whatever the implementation has for it, an array for most; a row is a token of a sequence. Those with a
    body are as on a single device that XLA may optimise as it likes.
    """

    @property
    def epsilon(self) -> Any:
        """The number that the model's norms add to the mean square."""

    def local(self, size: int) -> int:
        """The part that a weight on this device has of an axis that devices may split."""
        return size

    def array(self, weight: Any) -> Any:
        """A weight as a plain array; None for None."""
        return weight

    def columns(
        self, x: Array, weight: Any, shape: tuple[int, ...], *, units: int, bias: Any = None
    ) -> Float[Array, "..."]:
        """The product ``x @ weight + bias``, whose columns devices may split.

        Args:
            x: The input ``[*row, inputs]``.
            shape: The local sizes of the weight's axes after the first.
            units: The local number of heads, or of columns, that no device has a part of.
        """

    def part(self, x: Array, weight: Any, *, units: int) -> Float[Array, "*row embed"]:
        """The product ``x @ weight`` over the inputs on this device, all axes of the weight but the last.

        Args:
            x: The input ``[*row, ...]``, with the sizes of those axes or flat.
            units: See `columns`.
        """

    def total(self, part: Array) -> Array:
        """The sum of what `part` returned on all devices that split the weight."""
        return part

    def norm(self, x: Array, weight: Any, *, wide: bool = False, epsilon: float | None = None) -> Array:
        """The RMSNorm over the axes of the weight; without a weight ``x``.

        Args:
            wide: Whether devices may split these axes.
            epsilon: The number added to the mean square; None for the model's.
        """

    def hidden(self, w: LayerWeights, up: Array, gate: Array | None) -> Array:
        """The hidden activations of an MLP, see `lockstep.models.block.hidden`."""

    def gate(self, x: Array, h: Array, weight: Any) -> Array:
        """``x`` times the sigmoid of a number per token, ``h @ weight``."""

    def attend_latent(
        self, q: LatentQueries, latent: Array, kv_b: Any, attend: Attend
    ) -> Float[Array, "*row kv_head group head"]:
        """Attention by keys and values of the latent, or by the latent, see `lockstep.models.latent`.

        Args:
            latent: What is kept of each position ``[*row, size]``.
            kv_b: The weight that makes keys and values of it.
        """

    def shard(self, x: Array, *axes: str) -> Array:
        """``x`` with the sharding of its axes, which are those of the rows and these."""
        return x

    def keep(self, x: Array) -> Array:
        """``x`` as an array of its own, which several products read, where making it again for each reads more."""
        return x

    def fix[X](self, x: X) -> X:
        """``x``, as `lockstep.models.block.Fix`."""
        return x


def layer(
    ops: Ops, config: LlamaConfig, w: LayerWeights, x: Array, rotary: Rotary, attend: Any, mlp: FeedForward
) -> tuple[Float[Array, "*row embed"], Any]:
    """Attention, then the MLP, each between its norms and added to the residual stream.

    Args:
        w: The weights of the layer.
        x: The residual stream ``[*row, embed]``.
        attend: `Attend`, or `Recur` of a layer with linear attention.
        mlp: `feed_forward` with the weights of the layer.

    Returns:
        The residual stream, and what ``mlp`` returned beside its answer.
    """

    def stream(x: Array) -> Array:
        return ops.fix(ops.shard(x, "embed"))

    def added(answer: Array, post_norm: Any) -> Array:
        answer, scale = ops.norm(answer, post_norm), config.variant.residual_scale
        return answer if scale is None else ops.fix(block.scaled(answer, scale))

    w = as_full(w)
    x = stream(x)
    h = ops.keep(gated_norm(ops, x, w.attn_norm, w.attn_norm_down, w.attn_norm_up))
    if w.linear_o is None:
        attended = attention(ops, config, w, h, rotary, attend)
    else:
        attended = linear_attention(ops, config, w, h, attend)
    x = stream(x + added(attended, w.attn_post_norm))
    if not config.variant.parallel:
        # Where experts have norms of their own, feed_forward has all of them.
        h = x if w.routed_norm is not None else gated_norm(ops, x, w.mlp_norm, w.mlp_norm_down, w.mlp_norm_up)
    h, chosen = mlp(h)
    x = stream(x + added(h, w.mlp_post_norm))
    if w.layer_scalar is not None:
        x = ops.fix(x * jax.lax.stop_gradient(ops.array(w.layer_scalar)).astype(x.dtype))
    return x, chosen


def gated_norm(ops: Ops, x: Array, weight: Any, down: Any, up: Any) -> Array:
    """``x`` after the norm with a weight, and its gate, see `lockstep.models.block.gated_norm`."""
    return block.gated_norm(ops.norm(x, weight), ops.array(down), ops.array(up))


def first_stream(ops: Ops, config: LlamaConfig, weights: Any, x: Array) -> Float[Array, "*row embed"]:
    """The residual stream that the first layer reads.

    Args:
        weights: The weights of the model, such as `DecoderWeights`.
        x: The rows of the embedding.
    """
    x = block.scaled(x, config.embed_scale)
    return gated_norm(ops, x, weights.embed_norm, weights.embed_norm_down, weights.embed_norm_up)


def last_stream(ops: Ops, config: LlamaConfig, weights: Any, x: Array) -> Float[Array, "*row embed"]:
    """The input of the output layer, with the factor of the logits.

    Args:
        weights: See `first_stream`.
        x: The residual stream after the last layer.
    """
    x = gated_norm(ops, x, weights.final_norm, weights.final_norm_down, weights.final_norm_up)
    scale = config.variant.logit_scale
    return x if scale is None else ops.fix(block.scaled(x, scale))


def attention(ops: Ops, config: LlamaConfig, w: LayerWeights, h: Array, rotary: Rotary, attend: Attend) -> Array:
    """Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245), projections included.

    Args:
        h: The stream after the norm.
    """
    if config.latent is None:
        q, k, v, gate = project(ops, config, w, h, rotary)
        attended = attend(q, k, v).reshape(q.shape)
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate)
        if config.variant.exclusive_attention:
            attended = block.exclusive(attended, v[..., None, :])
    else:
        latent = latent_row(ops, config, w, h, rotary)
        attended = ops.attend_latent(latent_queries(ops, config, w, h, rotary), latent, w.kv_b, attend)
    heads = attended.shape[-3] * attended.shape[-2]
    if w.head_gate is not None:
        logits = ops.columns(h, w.head_gate, attended.shape[-3:-1], units=heads)
        attended = attended * block.head_gates(logits)[..., None]
    out = ops.total(ops.part(attended, w.o, units=heads))
    return out if w.o_bias is None else ops.fix(out + ops.array(w.o_bias))


def project(
    ops: Ops, config: LlamaConfig, w: LayerWeights, h: Array, rotary: Rotary
) -> tuple[
    Float[Array, "*row kv_head group head"], Float[Array, "*row kv_head head"], Float[Array, "*row kv_head head"], Any
]:
    """Queries, and keys and values ``[*row, kv_head, head]``, with norms and rotary embeddings; the gates of queries.

    Args:
        h: The stream after the norm.
    """
    kv, group, head = ops.local(config.num_kv_heads), config.q_heads_per_group, config.head_size
    gate = None
    if w.gated_q is None:
        q = ops.columns(h, w.q, (kv, group, head), units=kv * group, bias=w.q_bias)
    else:
        q, gate = jnp.split(ops.columns(h, w.gated_q, (kv, group, 2 * head), units=kv * group), 2, axis=-1)
    k = ops.columns(h, w.k, (kv, head), units=kv, bias=w.k_bias)
    v = k if w.v is None else ops.columns(h, w.v, (kv, head), units=kv, bias=w.v_bias)
    v = block.unit_norm(v, ops.epsilon if config.norms_values else None)
    late = config.variant.norm_after_rope
    q, k = (q, k) if late else (ops.norm(q, w.q_norm), ops.norm(k, w.k_norm))
    q, k = ops.norm(q, w.q_wide_norm, wide=True), ops.norm(k, w.k_wide_norm, wide=True)
    q, k = (block.unit_norm(x, config.variant.unit_qk_norm) for x in (q, k))
    if config.variant.interleaved_rope:
        q, k = (block.even_first(x, config.rope.rotated(head)) for x in (q, k))
    q = block.rotate(q, *(x[..., None, None, :] for x in rotary.of_queries), fix=ops.fix)
    k = block.rotate(k, *(x[..., None, :] for x in rotary[:2]), fix=ops.fix)
    q, k = ops.fix((q, k))
    q, k = (ops.norm(q, w.q_norm), ops.norm(k, w.k_norm)) if late else (q, k)
    q = ops.shard(block.scale_queries(q, config.attention_scale), "kv_head", "q_heads_per_group", "head_size")
    return q, ops.shard(k, "kv_head", "head_size"), ops.shard(v, "kv_head", "head_size"), gate


def linear_attention(ops: Ops, config: LlamaConfig, w: LayerWeights, h: Array, recur: Recur) -> Array:
    """A gated delta network (Yang et al. 2024, https://arxiv.org/abs/2412.06464), projections included.

    Args:
        h: The stream after the norm.
    """
    of = config.linear_attention
    assert of is not None
    heads, values = ops.local(of.key_heads), of.group * of.value_head_dim

    def joined(*weights: tuple[Any, int]) -> Array:
        """The products with some weights, which have so many columns for each key head, one after the other."""
        parts = [ops.columns(h, weight, (heads, size), units=heads) for weight, size in weights]
        parts = [part.reshape(*h.shape[:-1], heads, -1) for part in parts]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    if w.linear_qkvz is not None:
        inputs, gates = joined((w.linear_qkvz, of.qkvz)), joined((w.linear_gates, 2 * of.group))
    else:
        inputs = joined(
            (w.linear_q, of.key_head_dim), (w.linear_k, of.key_head_dim), (w.linear_v, values), (w.linear_z, values)
        )
        gates = joined((w.linear_b, of.group), (w.linear_a, of.group))
    inputs = ops.shard(inputs, "key_head", "qkvz")
    write, decay = (gate.astype(jnp.float32) for gate in jnp.split(gates, 2, axis=-1))
    rate, bias = (
        ops.array(x).reshape(decay.shape[-2:]).astype(jnp.float32) for x in (w.linear_decay, w.linear_decay_bias)
    )
    log_decay = -jnp.exp(rate) * jax.nn.softplus(decay + bias)
    parts = (w.linear_conv_q, w.linear_conv_k, w.linear_conv_v)
    taps = jnp.concatenate([ops.array(part).reshape(heads, -1, of.conv_width) for part in parts], axis=1)
    out = recur(inputs[..., : of.qkv], taps, DeltaGates(jax.nn.sigmoid(write), log_decay))
    out = block.Norm(ops.epsilon)(out, ops.array(w.linear_norm))
    gate = inputs[..., of.qkv :].reshape(out.shape).astype(jnp.float32)
    out = ops.shard((out * jax.nn.silu(gate)).astype(h.dtype), "key_head", "value_group", "value")
    return ops.total(ops.part(out, w.linear_o, units=heads))


def kept(
    ops: Ops, config: LlamaConfig, w: LayerWeights, h: Array, rotary: Rotary
) -> tuple[Float[Array, "*row kv_head head"], Float[Array, "*row kv_head value"]]:
    """Keys and values that a decoder keeps; a latent, of which the values are the first elements.

    Args:
        h: The stream after the norm.
    """
    if config.latent is None:
        return project(ops, config, as_full(w), h, rotary)[1:3]
    latent = latent_row(ops, config, w, h, rotary)[..., None, :]
    return latent, latent[..., : config.latent.kv_lora_rank]


def latent_row(ops: Ops, config: LlamaConfig, w: LayerWeights, h: Array, rotary: Rotary) -> Float[Array, "*row size"]:
    """The latent of keys and values after its norm, and the rotated key behind it.

    Args:
        h: The stream after the norm.
    """
    sizes = _sizes(config)
    row = ops.columns(h, w.kv_a, (sizes.size,), units=1)
    key = _rotate_latent(ops, config, row[..., sizes.kv_lora_rank :], rotary[:2])
    latent = ops.norm(row[..., : sizes.kv_lora_rank], w.kv_a_norm, epsilon=NORM_EPSILON)
    return jnp.concatenate([latent, key], axis=-1)


def latent_queries(ops: Ops, config: LlamaConfig, w: LayerWeights, h: Array, rotary: Rotary) -> LatentQueries:
    """The queries of the heads on this device.

    Args:
        h: The stream after the norm.
    """
    sizes, heads, weight = _sizes(config), ops.local(config.num_heads), w.q
    if w.q_a is not None and sizes.q_lora_rank is not None:
        h = ops.columns(h, w.q_a, (sizes.q_lora_rank,), units=1)
        h = ops.norm(h, w.q_a_norm, epsilon=NORM_EPSILON)
        weight = w.q_b
    q = ops.columns(h, weight, (heads, 1, sizes.head_size), units=heads)[..., 0, :]
    plain, rotated = q[..., : sizes.qk_nope_head_dim], q[..., sizes.qk_nope_head_dim :]
    rotated = _rotate_latent(ops, config, rotated, tuple(x[..., None, :] for x in rotary.of_queries))
    if rotary.factor is not None:
        plain = ops.fix((plain * rotary.factor[..., None, :]).astype(plain.dtype))
    return LatentQueries(plain, rotated, config.attention_scale or sizes.head_size**-0.5)


def _sizes(config: LlamaConfig) -> Latent:
    assert config.latent is not None
    return config.latent


def _rotate_latent(ops: Ops, config: LlamaConfig, x: Array, rotary: tuple[Array, ...]) -> Array:
    x = block.even_first(x, x.shape[-1]) if config.variant.interleaved_rope else x
    return ops.fix(block.rotate(x, *rotary, fix=ops.fix))


def feed_forward(
    ops: Ops, config: LlamaConfig, w: LayerWeights, h: Array, experts: OfExperts
) -> tuple[Float[Array, "*row embed"], Any]:
    """The answer of the MLP, or of a token's experts and the one that all tokens share.

    Args:
        w: The weights of the layer, of which norms but those of experts, and attention, are not read.
        h: The stream after the norm; before it where experts have norms of their own.
        experts: Called where there is a router; its answer is a part, as that of `Ops.part`.

    Returns:
        The answer, and what ``experts`` returned beside it; None where it was not called.
    """
    if w.router is None:
        part = _mlp_part(ops, w, h, (w.gate, w.up, w.down), ops.local(config.intermediate_dim), "mlp")
        return ops.total(part), None
    if w.routed_norm is not None:
        scaled = block.unit_norm(h, ops.epsilon) * (ops.array(w.router_scale) * config.hidden_dim**-0.5).astype(h.dtype)
        part, chosen = experts(ops.norm(h, w.routed_norm), scaled)
        shared = ops.norm(ops.total(_shared_part(ops, config, w, ops.norm(h, w.mlp_norm))), w.shared_post_norm)
        return shared + ops.norm(ops.total(part), w.routed_post_norm), chosen
    part, chosen = experts(h, None)
    if w.shared_up is not None:
        shared = _shared_part(ops, config, w, h)
        part = ops.fix(part + (shared if w.shared_router is None else ops.gate(shared, h, w.shared_router)))
    return ops.total(part), chosen


def _shared_part(ops: Ops, config: LlamaConfig, w: LayerWeights, h: Array) -> Float[Array, "*row embed"]:
    assert config.experts is not None and config.experts.shared_intermediate_dim is not None
    width = ops.local(config.experts.shared_intermediate_dim)
    return _mlp_part(ops, w, h, (w.shared_gate, w.shared_up, w.shared_down), width, "shared_mlp")


def _mlp_part(
    ops: Ops, w: LayerWeights, h: Array, matrices: tuple[Any, Any, Any], width: int, axis: str
) -> Float[Array, "*row embed"]:
    gate, up, down = matrices
    hidden_up = ops.columns(h, up, (width,), units=width)
    hidden_gate = None if gate is None else ops.columns(h, gate, (width,), units=width)
    return ops.part(ops.shard(ops.hidden(w, hidden_up, hidden_gate), axis), down, units=width)
