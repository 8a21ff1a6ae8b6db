"""A forward pass whose settings are arrays: one compiled program computes a model with any of them.

The layer is that of `lockstep.models.layers`, in float32. `lockstep.models.reader_search` tries with it what a reader
may have wrong.
"""

import dataclasses
import types
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lockstep.models import block
from lockstep.models.attention import NO_WINDOW
from lockstep.models.config import LayerKind, LlamaConfig, layer_kinds, rotary_frequencies
from lockstep.models.latent import LatentQueries
from lockstep.models.layers import Attend, feed_forward, first_stream, last_stream, layer
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
type Settings = dict[str, Any]
"""Arrays by name, so that another value needs no other program; see `settings_of`."""


def settings_of(config: LlamaConfig) -> Settings:
    """The settings that a configuration says, as NumPy arrays."""
    variant, kinds = config.variant, layer_kinds(config)
    known, experts = variant.activation in ACTIVATIONS, config.experts
    return {
        **of_layers(config, kinds),
        "interleaved": np.bool_(False),  # element 2 i of a head is rotated with 2 i + 1, not i with i + half
        "epsilon": np.float32(config.layer_norm_epsilon),
        "norm_offset": np.float32(config.norm.offset),
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


def of_layers(config: LlamaConfig, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
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
    # The factors of attention scores and of the embedding are settings.
    variant = dataclasses.replace(config.variant, attention_scale=None, embed_scale=None)
    config = dataclasses.replace(config, variant=variant)
    ops = Searched(config, settings)
    position = jnp.arange(ids.shape[1])
    distance = position[:, None] - position

    def run(x: Array, inputs: Any) -> tuple[Array, None]:
        parts, frequencies, window = inputs
        w: Any = types.SimpleNamespace(**parts)
        angles = block.rope_angles(position, [frequencies])

        def attend(q: Array, k: Array, v: Array) -> Array:
            scores = jnp.einsum("btkgh,bskh->bkgts", q, k)
            scores = _capped(scores * settings["attention_scale"], settings["attention_cap"])
            scores = jnp.where((distance >= 0) & (distance < window), scores, -jnp.inf)
            if w.sinks is not None:
                nothing = jnp.broadcast_to(w.sinks.reshape(*q.shape[2:4], 1, 1), (*scores.shape[:-1], 1))
                scores = jnp.concatenate([scores, nothing], axis=-1)
            return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores)[..., : ids.shape[1]], v)

        def experts(h: Array) -> tuple[Array, None]:
            return ops.mixture(w, h), None

        def dense(h: Array) -> tuple[Array, None]:
            return feed_forward(ops, config, _without_router(w), h, experts)

        def mlp(h: Array) -> tuple[Array, None]:
            if w.router is None or w.up is None:
                return feed_forward(ops, config, w, h, experts)
            answer: tuple[Array, None]
            answer = jax.lax.cond(w.dense, dense, lambda h: feed_forward(ops, config, w, h, experts), h)
            return answer

        return layer(ops, config, w, x, (jnp.cos(angles), jnp.sin(angles)), attend, mlp)

    x = first_stream(ops, config, weights, settings["embed_scale"] * weights.embed[ids])
    x, _ = jax.lax.scan(run, x, (_layers(config, weights, settings), settings["frequencies"], settings["window"]))
    output = weights.embed.T
    if weights.lm_head is not None:
        output = jnp.where(settings["tied"], output, weights.lm_head)
    return _capped(last_stream(ops, config, weights, x) @ output, settings["logit_cap"])


def _without_router(w: Any) -> Any:
    return types.SimpleNamespace(**{**vars(w), "router": None})


@dataclasses.dataclass(frozen=True)
class Searched:
    """`lockstep.models.layers.Ops` on one device, with the settings of norms, activations and experts as arrays."""

    config: LlamaConfig
    settings: Settings

    def local(self, size: int) -> int:
        return size

    def array(self, weight: Any) -> Any:
        return weight

    def columns(self, x: Array, weight: Array, shape: tuple[int, ...], *, units: int, bias: Any = None) -> Array:
        out = jnp.tensordot(x, weight, 1)
        return (out if bias is None else out + bias).reshape(*x.shape[:2], *shape)

    def part(self, x: Array, weight: Array, *, units: int) -> Array:
        return x.reshape(*x.shape[:2], -1) @ weight.reshape(-1, weight.shape[-1])

    def total(self, part: Array) -> Array:
        return part

    def norm(self, x: Array, weight: Array | None, *, wide: bool = False) -> Array:
        if weight is not None and wide:
            weight = weight.reshape(x.shape[2:])
        settings = {"epsilon": self.settings["epsilon"], "offset": self.settings["norm_offset"]}
        return dataclasses.replace(self.config.norm, **settings)(x, weight)

    def hidden(self, w: Any, up: Array, gate: Array | None) -> Array:
        if gate is None:
            return block.xielu(up, w.xielu_p, w.xielu_n, w.xielu_beta, w.xielu_eps)
        return self.activate(gate) * up

    def gate(self, x: Array, h: Array, weight: Array) -> Array:
        return x * jax.nn.sigmoid(h @ weight)

    def attend_latent(self, q: LatentQueries, latent: Array, kv_b: Any, attend: Attend) -> Array:
        raise AssertionError("models with a latent are not searched")

    def shard(self, x: Array, *axes: str) -> Array:
        return x

    def keep(self, x: Array) -> Array:
        return x

    def fix[X](self, x: X) -> X:
        return x

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
        scores = jax.nn.softmax(logits) if experts.scoring == "softmax" else jax.nn.sigmoid(unbiased)
        order = scores + w.router_bias if experts.scoring == "biased_sigmoid" else logits
        ranks = jnp.argsort(jnp.argsort(-order, axis=-1), axis=-1)
        shares = jnp.where(ranks < settings["experts_per_token"], scores, 0.0)
        shares = jnp.where(settings["norm_topk_prob"], shares / jnp.sum(shares, axis=-1, keepdims=True), shares)
        shares *= experts.routed_scaling_factor
        if w.expert_gate_up is None:
            inner = self.activate(product("bte,xem->btxm", h, "expert_gate")) * product("bte,xem->btxm", h, "expert_up")
        else:
            inner = block.clamped_swiglu(product("bte,xem->btxm", h, "expert_gate_up"))
        return jnp.einsum("btxe,btx->bte", product("btxm,xme->btxe", inner, "expert_down"), shares)


def _layers(config: LlamaConfig, weights: DecoderWeights, settings: Settings) -> dict[str, Array | None]:
    """The weights of the layers as the settings take them, those of q, k, v and o by head."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    layers = {field.name: getattr(weights.layers, field.name) for field in dataclasses.fields(weights.layers)}
    every = np.arange(config.num_layers)
    dense, places = (None, every) if config.experts is None else config.experts.places(config.num_layers)
    # A layer of the other kind takes the weights of any, which are not computed with.
    own = {name: places if len(config.layers_of(name)) < len(every) else every for name in layers}
    layers = {
        name: weight if weight is None else weight[jnp.asarray(own[name])[settings["layers"]]]
        for name, weight in layers.items()
    }
    layers["dense"] = None if dense is None else jnp.asarray(dense)[settings["layers"]]
    for number, (first, second) in enumerate(PAIRS):
        a, b = layers[first], layers[second]
        if a is not None and b is not None and a.shape == b.shape:
            flag = settings["swapped"][number]
            layers[first], layers[second] = jnp.where(flag, b, a), jnp.where(flag, a, b)
    for number, name in enumerate(SQUARE):
        sides = (config.hidden_dim, -1) if name != "o" else (-1, config.hidden_dim)
        weight = layers[name].reshape(config.num_layers, *sides)
        if weight.shape[1] == weight.shape[2]:
            weight = jnp.where(settings["transposed"][number], weight.swapaxes(1, 2), weight)
        layers[name] = weight
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
            weight = layers.get(name + suffix)
            if weight is not None:
                weight = weight.reshape(-1, *shape)
                weight = weight[..., settings["heads"], :] if name == "q" and len(shape) > 1 else weight
                layers[name + suffix] = weight if name == "v" else weight[..., order]
    for name, shape in (("sinks", (-1, heads)), ("head_gate", (config.num_layers, -1, heads))):
        if layers[name] is not None:
            layers[name] = layers[name].reshape(shape)[..., settings["heads"]]
    layers["o"] = layers["o"].reshape(-1, heads, size, config.hidden_dim)[:, settings["heads"]]
    return layers


def _capped(x: Array, cap: Array) -> Array:
    """Scores with the soft cap that is an array, 0 for none."""
    return jnp.where(cap > 0, block.soft_cap(x, jnp.where(cap > 0, cap, 1.0)), x)
