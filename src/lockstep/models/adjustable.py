"""A forward pass whose settings are arrays: one compiled program computes a model with any of them.

The layer is that of `lockstep.models.layers`, in float32. `lockstep.models.reader_search` tries with it what a reader
may have wrong.
"""

import dataclasses
import math
import types
from collections.abc import Sequence
from typing import Any, Final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lockstep.models import block
from lockstep.models.attention import NO_WINDOW
from lockstep.models.config import LlamaConfig
from lockstep.models.delta_rule import DeltaGates, DeltaState, gated_delta
from lockstep.models.experts import Scoring
from lockstep.models.latent import LatentQueries, expanded
from lockstep.models.layer_kinds import LayerKind, layer_kinds, rotary, rotary_frequencies
from lockstep.models.layers import Attend, Ops, feed_forward, first_stream, last_stream, layer
from lockstep.models.rope import RotaryConfig, YarnScaling, query_factor
from lockstep.models.weight_sizes import sizes_of
from lockstep.models.weights import ATTENTION_WEIGHTS, LINEAR_WEIGHTS, SPLIT_DELTA, WEIGHT_AXES, DecoderWeights

ACTIVATIONS: Final = tuple(block.ACTIVATIONS)
SCORINGS: Final[tuple[str, ...]] = get_args(Scoring)
PAIRS: Final = (
    ("gate", "up"),
    ("expert_gate", "expert_up"),
    ("shared_gate", "shared_up"),
    ("k", "v"),
    ("attn_norm", "mlp_norm"),
    ("attn_post_norm", "mlp_post_norm"),
    ("attn_post_norm", "mlp_norm"),
    ("q_norm", "k_norm"),
    ("q_a_norm", "kv_a_norm"),
    ("linear_q", "linear_k"),
    ("linear_v", "linear_z"),
    ("linear_b", "linear_a"),
    ("linear_conv_q", "linear_conv_k"),
    ("linear_decay", "linear_decay_bias"),
)
"""Weights of one shape that a reader can take for each other."""
SQUARE: Final = ("q", "k", "v", "o")
"""Weights that can be square, so that their transpose has the right shape too."""
ORDERED: Final = (
    *("q", "gated_q", "q_b", "k", "q_bias", "k_bias", "q_norm", "k_norm", "q_wide_norm", "k_wide_norm"),
    *("kv_a", "kv_b", "o", "sinks", "head_gate", "linear_qkvz", "linear_gates", "linear_conv_q", "linear_conv_k"),
    *("linear_conv_v", "linear_decay", "linear_decay_bias", "linear_o", *SPLIT_DELTA),
)
"""Weights whose heads, or parts of heads, a reader can have in another order."""
_STREAMS: Final = ("embed", "q_latent", "kv_latent")
"""Axes of weights that are of no head."""
type Settings = dict[str, Any]
"""Arrays by name, so that another value needs no other program; see `settings_of`."""


def settings_of(config: LlamaConfig) -> Settings:
    """The settings that a configuration says, as NumPy arrays."""
    variant, kinds = config.variant, layer_kinds(config)
    known, experts = variant.activation in ACTIVATIONS, config.experts
    return {
        **of_layers(config, kinds),
        **attention_kinds(np.isin(range(config.num_layers), config.linear_layers)),
        "epsilon": np.float32(config.layer_norm_epsilon),
        "norm_offset": np.float32(config.norm.offset),
        "linear_norm_offset": np.float32(0.0),
        "embed_scale": np.float32(config.embed_scale or 1.0),
        "attention_scale": np.float32(variant.attention_scale or config.head_size**-0.5),
        "attention_cap": np.float32(variant.attention_soft_cap or 0.0),  # 0 for none
        "logit_cap": np.float32(variant.logit_soft_cap or 0.0),
        "activation": np.int32(ACTIVATIONS.index(variant.activation) if known else 0),
        "tied": np.bool_(config.tie_word_embeddings),
        "orders": {name: index.reshape(-1) for name in ORDERED if (index := units_of(config, name)) is not None},
        "plain_decay": np.bool_(False),  # whether linear_decay is the rate, not its logarithm
        "layers": np.arange(config.num_layers, dtype=np.int32),  # the model's layer that is the decoder's i-th
        "experts_per_token": np.int32(experts.num_experts_per_tok if experts else 0),
        "groups_per_token": np.int32(experts.groups_per_tok if experts else 0),
        "norm_topk_prob": np.bool_(experts is not None and experts.norm_topk_prob),
        "scoring": np.int32(SCORINGS.index(experts.scoring) if experts else 0),
        "routed_scale": np.float32(experts.routed_scaling_factor if experts else 1.0),
        "swapped": np.zeros(len(PAIRS), bool),
        "transposed": np.zeros(len(SQUARE), bool),
    }


def of_layers(config: LlamaConfig, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    """Those of `of_ropes`, and the positions that a query attends to ``[layer]``."""
    return {
        **of_ropes(config, [kind.rope for kind in kinds]),
        "window": np.array([kind.window or NO_WINDOW for kind in kinds], np.int32),
    }


def of_ropes(config: LlamaConfig, ropes: Sequence[RotaryConfig]) -> dict[str, Any]:
    """Radians per token ``[layer, half_head]``, and factors of attention scores and of later queries ``[layer]``."""
    yarns = [rope.yarn or YarnScaling() for rope in ropes]
    return {
        "frequencies": np.stack([rotary_frequencies(config, rope) for rope in ropes]),
        "score_factor": np.array([rope.score_factor for rope in ropes], np.float32),
        "beta": np.array([yarn.llama_4_scaling_beta or 0.0 for yarn in yarns], np.float32),
        "context": np.array([yarn.original_max_position_embeddings for yarn in yarns], np.int32),
    }


def attention_kinds(linear: np.ndarray) -> dict[str, Any]:
    """Whether each layer has linear attention, and its place among the layers of its kind.

    Args:
        linear: The first of these, ``[layer]``.
    """
    places = np.where(linear, np.cumsum(linear), np.cumsum(~linear)) - 1
    return {"linear": linear.astype(bool), "attention_place": places.astype(np.int32)}


def units_of(config: LlamaConfig, name: str) -> Int[np.ndarray, "*axis"] | None:
    """The numbers of the elements of a weight along its axes of heads, in order; None where no model has such sizes."""
    sizes, axes = sizes_of(config, name), [axis for axis in WEIGHT_AXES[name][1:] if axis not in _STREAMS]
    if not all(axis in sizes for axis in axes):
        return None
    shape = [sizes[axis] for axis in axes]
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def adjustable_logits(
    config: LlamaConfig, weights: DecoderWeights, ids: Int[Array, "batch position"], settings: Settings
) -> Float[Array, "batch position vocab"]:
    """The logits of a model in float32, with settings that need not be those of its configuration.

    Args:
        config: The configuration, for the sizes alone.
        weights: The weights; computed with in float32.
    """
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    config = _without_factors(config)
    ops = Searched(config, settings)
    position = jnp.arange(ids.shape[1])
    distance = position[:, None] - position

    def run(x: Array, inputs: Any) -> tuple[Array, None]:
        parts, frequencies, factor, beta, context, window = inputs
        w: Any = types.SimpleNamespace(**parts)
        angles = rotary(config, block.rope_angles(position, [frequencies]))
        factor = factor * query_factor(position // context, beta, jnp.log)[:, None]

        def attend(q: Array, k: Array, v: Array) -> Array:
            scores = jnp.einsum("btkgh,bskh->bkgts", q, k)
            scores = _capped(scores * (settings["attention_scale"] * factor), settings["attention_cap"])
            scores = jnp.where((distance >= 0) & (distance < window), scores, -jnp.inf)
            if w.sinks is not None:
                nothing = jnp.broadcast_to(w.sinks.reshape(*q.shape[2:4], 1, 1), (*scores.shape[:-1], 1))
                scores = jnp.concatenate([scores, nothing], axis=-1)
            return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores)[..., : ids.shape[1]], v)

        def experts(h: Array, of_router: Array | None) -> tuple[Array, None]:
            return ops.mixture(w, h), None

        def dense(h: Array) -> tuple[Array, None]:
            return feed_forward(ops, config, _without(w, "router"), h, experts)

        def mlp(h: Array) -> tuple[Array, None]:
            if w.router is None or w.up is None:
                return feed_forward(ops, config, w, h, experts)
            answer: tuple[Array, None]
            answer = jax.lax.cond(w.dense, dense, lambda h: feed_forward(ops, config, w, h, experts), h)
            return answer

        def full(x: Array) -> tuple[Array, None]:
            return layer(ops, config, _without(w, *LINEAR_WEIGHTS), x, angles, attend, mlp)

        def linear(x: Array) -> tuple[Array, None]:
            return layer(ops, config, w, x, angles, ops.recur, mlp)

        answer: tuple[Array, None]
        answer = full(x) if w.linear_o is None else jax.lax.cond(w.linear, linear, full, x)
        return answer

    x = first_stream(ops, config, weights, settings["embed_scale"] * weights.embed[ids])
    of_layer = (settings[name] for name in ("frequencies", "score_factor", "beta", "context", "window"))
    x, _ = jax.lax.scan(run, x, (_layers(config, weights, settings), *of_layer))
    output = weights.embed.T
    if weights.lm_head is not None:
        output = jnp.where(settings["tied"], output, weights.lm_head)
    return _capped(last_stream(ops, config, weights, x) @ output, settings["logit_cap"])


def _without_factors(config: LlamaConfig) -> LlamaConfig:
    """The configuration less the factors of attention scores and of the embedding, which are settings."""
    sliding = config.variant.sliding_rope
    sliding = sliding and dataclasses.replace(sliding, yarn=None)
    variant = dataclasses.replace(config.variant, attention_scale=None, embed_scale=None, sliding_rope=sliding)
    return dataclasses.replace(config, variant=variant, rope=dataclasses.replace(config.rope, yarn=None))


def _without(w: Any, *names: str) -> Any:
    return types.SimpleNamespace(**{**vars(w), **dict.fromkeys(names)})


@dataclasses.dataclass(frozen=True)
class Searched(Ops):
    """`Ops` on one device, with the settings of norms, activations and experts as arrays."""

    config: LlamaConfig
    settings: Settings

    @property
    def epsilon(self) -> Any:
        return self.settings["epsilon"]

    def columns(self, x: Array, weight: Array, shape: tuple[int, ...], *, units: int, bias: Any = None) -> Array:
        out = x @ weight.reshape(len(weight), -1)
        return (out if bias is None else out + bias.reshape(-1)).reshape(*x.shape[:2], *shape)

    def part(self, x: Array, weight: Array, *, units: int) -> Array:
        return x.reshape(*x.shape[:2], -1) @ weight.reshape(-1, weight.shape[-1])

    def norm(self, x: Array, weight: Array | None, *, wide: bool = False, epsilon: float | None = None) -> Array:
        if weight is not None and wide:
            weight = weight.reshape(x.shape[2:])
        settings = {"epsilon": self.epsilon if epsilon is None else epsilon, "offset": self.settings["norm_offset"]}
        return dataclasses.replace(self.config.norm, **settings)(x, weight)

    def hidden(self, w: Any, up: Array, gate: Array | None) -> Array:
        if gate is None:
            xielu = (w.xielu_p, w.xielu_n, w.xielu_beta, w.xielu_eps)
            return block.hidden(self.config.variant.activation, up, gate, xielu)
        return self.activate(gate) * up

    def gate(self, x: Array, h: Array, weight: Array) -> Array:
        return x * jax.nn.sigmoid(h @ weight)

    def attend_latent(self, q: LatentQueries, latent: Array, kv_b: Array, attend: Attend) -> Array:
        heads = q.plain.shape[-2]
        kv = self.columns(latent[..., : len(kv_b)], kv_b, (heads, kv_b.size // len(kv_b) // heads), units=heads)
        return attend(*expanded(q, latent, kv))

    def recur(self, inputs: Array, taps: Array, gates: DeltaGates) -> Array:
        """The state of rows that are whole sequences, see `lockstep.models.layers.Recur`."""
        of = self.config.linear_attention
        assert of is not None
        start = DeltaState.zeros(of, len(inputs), of.key_heads, jnp.dtype(jnp.float32))
        return gated_delta(of, inputs, taps, gates, start)[0]

    def activate(self, h: Array) -> Array:
        activated: Array = jax.lax.switch(self.settings["activation"], list(block.ACTIVATIONS.values()), h)
        return activated

    def mixture(self, w: Any, h: Array) -> Array:
        """The answers of experts by the weights of a token's own; all experts compute all tokens."""

        def product(equation: str, x: Array, name: str) -> Array:
            out, bias = jnp.einsum(equation, x, getattr(w, name)), getattr(w, f"{name}_bias", None)
            return out if bias is None else out + bias

        experts, settings = self.config.experts, self.settings
        assert experts is not None
        logits, unbiased = product("bte,ex->btx", h, "router"), jnp.einsum("bte,ex->btx", h, w.router)
        scoring, sigmoids = settings["scoring"], jax.nn.sigmoid(unbiased)
        scores = jnp.where(scoring == SCORINGS.index("softmax"), jax.nn.softmax(logits), sigmoids)
        order = jnp.where(scoring == SCORINGS.index("biased_sigmoid"), sigmoids + (logits - unbiased), logits)
        if experts.groups > 1:
            by_group = order.reshape(*order.shape[:-1], experts.groups, -1)
            two = jax.lax.top_k(by_group, 2)[0]
            of_groups = jnp.where(scoring == SCORINGS.index("softmax"), two[..., 0], two.sum(axis=-1))
            best = _ranks(of_groups) < settings["groups_per_token"]
            order = jnp.where(best[..., None], by_group, -jnp.inf).reshape(order.shape)
        shares = jnp.where(_ranks(order) < settings["experts_per_token"], scores, 0.0)
        shares = jnp.where(settings["norm_topk_prob"], shares / jnp.sum(shares, axis=-1, keepdims=True), shares)
        shares *= settings["routed_scale"]
        if w.expert_gate_up is None:
            inner = self.activate(product("bte,xem->btxm", h, "expert_gate")) * product("bte,xem->btxm", h, "expert_up")
        else:
            inner = block.clamped_swiglu(product("bte,xem->btxm", h, "expert_gate_up"))
        return jnp.einsum("btxe,btx->bte", product("btxm,xme->btxe", inner, "expert_down"), shares)


def _layers(config: LlamaConfig, weights: DecoderWeights, settings: Settings) -> dict[str, Array | None]:
    """The weights of the layers as the settings take them, those in an order of their own with heads as one axis."""
    layers = {field.name: getattr(weights.layers, field.name) for field in dataclasses.fields(weights.layers)}
    every = np.arange(config.num_layers)
    dense = None if config.experts is None else config.experts.places(config.num_layers)[0]

    def place(name: str, count: int) -> Array:
        """The place of a weight for each layer; for a layer without it any, which is not computed with."""
        if config.linear_attention is not None and name in LINEAR_WEIGHTS | ATTENTION_WEIGHTS:
            return jnp.minimum(settings["attention_place"], count - 1)
        return jnp.asarray(np.minimum(np.searchsorted(config.layers_of(name), every), count - 1))

    layers = {
        name: weight if weight is None else weight[place(name, len(weight))[settings["layers"]]]
        for name, weight in layers.items()
    }
    layers["dense"] = None if dense is None else jnp.asarray(dense)[settings["layers"]]
    layers["linear"] = settings["linear"][settings["layers"]]
    for number, (first, second) in enumerate(PAIRS):
        a, b = layers[first], layers[second]
        if a is not None and b is not None and a.shape == b.shape:
            flag = settings["swapped"][number]
            layers[first], layers[second] = jnp.where(flag, b, a), jnp.where(flag, a, b)
    for number, name in enumerate(SQUARE):
        if layers[name] is None:
            continue
        sides = (config.hidden_dim, -1) if name != "o" else (-1, config.hidden_dim)
        weight = layers[name].reshape(config.num_layers, *sides)
        if weight.shape[1] == weight.shape[2]:
            weight = jnp.where(settings["transposed"][number], weight.swapaxes(1, 2), weight)
        layers[name] = weight
    for name, order in settings["orders"].items():
        if (weight := layers[name]) is not None:
            axes = WEIGHT_AXES[name]
            axis = 2 if axes[1] in _STREAMS else 1
            shape = *weight.shape[:axis], len(order), *(weight.shape[-1:] if axes[-1] == "embed" else ())
            layers[name] = jnp.take(weight.reshape(shape), order, axis=axis)
    if layers["linear_norm"] is not None:
        rate = layers["linear_decay"]
        layers["linear_decay"] = jnp.where(settings["plain_decay"], jnp.log(rate), rate)
        layers["linear_norm"] = layers["linear_norm"] + settings["linear_norm_offset"]
    return layers


def _ranks(x: Array) -> Array:
    """The number of larger ones in the last axis, of which the first counts as larger where two are equal."""
    return jnp.argsort(jnp.argsort(-x, axis=-1), axis=-1)


def _capped(x: Array, cap: Array) -> Array:
    """Scores with the soft cap that is an array, 0 for none."""
    return jnp.where(cap > 0, block.soft_cap(x, jnp.where(cap > 0, cap, 1.0)), x)
