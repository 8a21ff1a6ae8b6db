"""Mixtures of experts on plain arrays: the router, and the MLPs of experts over tokens grouped by expert.

The trainable model and the engine's decoder compute with these. Nothing has a capacity and no token is dropped: what a
token's experts answer does not depend on the other tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.errors import ConfigError
from lockstep.models.block import hidden
from lockstep.models.weights import MLP_WEIGHTS, SPARSE_WEIGHTS
from lockstep.placement import QuantizedWeight, matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts that take the place of a layer's MLP.

    Raises:
        ConfigError: A value cannot work.

    Example:
        >>> lockstep.models.Experts(num_experts=128, num_experts_per_tok=8).expected_hits(1)
        8.0
    """

    num_experts: int = 8
    """The number of experts of each layer."""
    num_experts_per_tok: int = 2
    """The number of experts that a token is given to: those with its largest router logits, the lower number where
    two are equal."""
    intermediate_dim: int | None = None
    """The width of an expert's MLP. Null for the model's ``intermediate_dim``."""
    mlp_only_layers: tuple[int, ...] = ()
    """The numbers of the layers, from 0, that have an MLP of the model's ``intermediate_dim`` instead of experts."""
    shared_intermediate_dim: int | None = None
    """The width of a shared expert, an MLP that every token is given to beside its own experts. Null for none."""
    shared_router: bool = False
    """Whether the shared expert's answer is multiplied by the sigmoid of a logit of the token (Qwen2-MoE)."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    load_balancing_coef: float = 0.001
    """The factor of the load-balancing loss (Switch Transformers, https://arxiv.org/abs/2101.03961, equation 4), summed
    over a token's experts as in transformers and Levanter: it is their number where all are used evenly. 0 for none."""
    router_z_coef: float = 0.0
    """The factor of the router z-loss (ST-MoE, https://arxiv.org/abs/2202.08906, equation 5). 0 for none."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_experts_per_tok", "intermediate_dim", "shared_intermediate_dim"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ConfigError(f"experts.{name} is {value!r}; it must be a whole number of at least 1. Correct it.")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"experts.num_experts_per_tok is {self.num_experts_per_tok} and experts.num_experts is "
                f"{self.num_experts}; a token has no more experts than there are. Lower num_experts_per_tok."
            )
        if self.shared_router and self.shared_intermediate_dim is None:
            raise ConfigError(
                "experts.shared_router is true and experts.shared_intermediate_dim is null: there is no shared expert. "
                "Set its width, or shared_router to false."
            )
        only = self.mlp_only_layers
        if list(only) != sorted(set(only)) or any(layer < 0 for layer in only):
            raise ConfigError(
                f"experts.mlp_only_layers is {list(only)}; it must be numbers of layers from 0, each once, in order. "
                "Correct it."
            )
        for name in ("load_balancing_coef", "router_z_coef"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"experts.{name} is {getattr(self, name)}; it must be at least 0. Use 0 for none.")

    def check_layers(self, num_layers: int) -> None:
        """Refuses ``mlp_only_layers`` that are not layers of a model, or all of them."""
        only = self.mlp_only_layers
        if only and (only[-1] >= num_layers or len(only) == num_layers):
            raise ConfigError(
                f"experts.mlp_only_layers is {list(only)} and num_layers is {num_layers}, counted from 0; a layer must "
                "be left that has experts. Correct it, or set experts to null."
            )

    def layers_of(self, weight: str, layers: Sequence[int]) -> Sequence[int]:
        """The layers that have a weight, of those of a model."""
        only = self.mlp_only_layers
        if only and weight in MLP_WEIGHTS:
            return only
        if only and weight in SPARSE_WEIGHTS:
            return tuple(layer for layer in layers if layer not in only)
        return layers

    def expected_hits(self, tokens: float) -> float:
        """The expected number of distinct experts that some tokens are given to, where experts are used evenly.

        ``E (1 - (1 - k / E) ** tokens)``, with k of E experts for a token.
        """
        missed = 1 - self.num_experts_per_tok / self.num_experts
        return float(self.num_experts * (1 - missed**tokens))


class Routing(NamedTuple):
    """The experts of tokens."""

    experts: Int[Array, "token choice"]
    """Their numbers, that with the largest logit first."""
    weights: Float[Array, "token choice"]
    """The factors of what they answer, float32."""
    logits: Float[Array, "token expert"]
    """The router's logits, float32."""


class RouterSums(NamedTuple):
    """Sums over tokens of what losses and metrics of a router are made of; those of several devices add up."""

    tokens: Float[Array, "..."]
    """The number of tokens."""
    counts: Float[Array, "... expert"]
    """The number of tokens that each expert was given."""
    probabilities: Float[Array, "... expert"]
    """The router's probabilities."""
    squares: Float[Array, "..."]
    """The squares of the logits' log-sum-exp."""

    @classmethod
    def of(cls, routing: Routing, valid: Bool[Array, " token"]) -> Self:
        """The sums of the tokens that are ``valid``."""
        given = jnp.where(valid, 1.0, 0.0)
        chosen = jax.nn.one_hot(routing.experts, routing.logits.shape[-1], dtype=jnp.float32).sum(axis=1)
        return cls(
            tokens=given.sum(),
            counts=given @ chosen,
            probabilities=given @ jax.nn.softmax(routing.logits, axis=-1),
            squares=given @ jax.nn.logsumexp(routing.logits, axis=-1) ** 2,
        )

    def loss(self, experts: Experts) -> Float[Array, "..."]:
        """The load-balancing loss and the router z-loss of each layer, with their factors."""
        tokens = jnp.maximum(self.tokens, 1.0)
        shares, probabilities = self.counts / tokens[..., None], self.probabilities / tokens[..., None]
        even = experts.num_experts * jnp.sum(shares * probabilities, axis=-1)
        return experts.load_balancing_coef * even + experts.router_z_coef * self.squares / tokens

    def metrics(self) -> dict[str, Float[Array, ""]]:
        """The entropy of the experts' load, 1 where it is even, and the share of the busiest; means over layers."""
        shares = self.counts / jnp.maximum(self.counts.sum(axis=-1, keepdims=True), 1.0)
        entropy = -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=-1) / jnp.log(max(shares.shape[-1], 2))
        return {"router/load_entropy": entropy.mean(), "router/busiest_share": shares.max(axis=-1).mean()}


def route(
    x: Float[Array, "token embed"], router: Float[Array, "embed expert"], bias: Array | None, experts: Experts
) -> Routing:
    """Return the experts of tokens. Logits are products in float32 on every backend, for a tie decides by rounding."""
    logits = jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    largest, chosen = jax.lax.top_k(logits, experts.num_experts_per_tok)
    if experts.norm_topk_prob:
        weights = jax.nn.softmax(largest, axis=-1)
    else:
        weights = jnp.exp(largest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return Routing(chosen, weights, logits)


class ExpertWeights(NamedTuple):
    """The matrices of the experts of a layer, or of those that a device has."""

    gate: Any
    """``[expert, embed, expert_mlp]``; like the others an array or a `lockstep.placement.QuantizedWeight`. None where
    it is in ``up`` (`lockstep.models.block.clamped_swiglu`)."""
    up: Any
    """``[expert, embed, expert_mlp]``; with the gate ``[expert, embed, gate_up]``."""
    down: Any
    """``[expert, expert_mlp, embed]``."""
    up_bias: Any = None
    """``[expert, gate_up]``."""
    down_bias: Any = None
    """``[expert, embed]``; of devices that share the width of experts, one has it and the others zeros."""


def mixture(
    x: Float[Array, "token embed"],
    routing: Routing,
    weights: ExpertWeights,
    activation: str,
    *,
    first: Int[Array, ""] | int = 0,
    valid: Bool[Array, " token"] | None = None,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "token embed"]:
    """Return the weighted sum of what each token's experts answer.

    Args:
        x: The tokens.
        routing: Their experts.
        weights: The experts that are on this device, or their part of ``expert_mlp``.
        activation: The activation of their gated MLPs.
        first: The number of the first of them; what the others answer is not in the sum.
        valid: Which tokens matter; no expert is read for the others, whose result is 0. None for all.
        layer: The layer, where the weights are those of all layers, stacked: a slice of one would be a copy of all its
            experts, hit or not. None where they are those of one.
    """
    base: Int[Array, ""] | int = 0
    count = jax.tree.leaves(weights.down)[0].shape[0 if layer is None else 1]
    if layer is not None:
        weights = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weights)
        base = layer * count
    local = routing.experts - first
    here = (local >= 0) & (local < count)
    here = here if valid is None else here & valid[:, None]
    group = jnp.where(here, local, count).reshape(-1)
    order = jnp.argsort(group, stable=True)
    sizes = jnp.diff(jnp.searchsorted(group[order], jnp.arange(count + 1))).astype(jnp.int32)
    computed = (jnp.arange(group.size) < sizes.sum())[:, None]
    rows = jnp.where(computed, x[order // routing.experts.shape[1]], 0)
    average = group.size / routing.logits.shape[-1]
    answers = jnp.where(computed, grouped_mlp(rows, weights, sizes, activation, base, average=average), 0)
    answers = answers[jnp.argsort(order)].reshape(*routing.experts.shape, -1)
    return jnp.einsum("nkd,nk->nd", answers.astype(jnp.float32), routing.weights).astype(x.dtype)


def grouped_mlp(
    x: Float[Array, "row embed"],
    weights: ExpertWeights,
    sizes: Int[Array, " group"],
    activation: str,
    base: Int[Array, ""] | int = 0,
    *,
    average: float,
) -> Float[Array, "row embed"]:
    """Return the gated MLP of each row by the expert of its group; rows after the last group are arbitrary.

    On TPU the products are those of megablox, which reads the experts whose group is not empty; so does the loop over
    tiles of rows that computes it elsewhere, and for weights in 8 bits.

    Args:
        x: Rows, grouped by expert.
        sizes: The number of rows of each group.
        base: The expert of the first group.
        average: The rows of a group where experts are used evenly.
    """
    quantized = any(isinstance(weight, QuantizedWeight) for weight in weights)
    # About the rows of a group: smaller tiles read an expert more often, larger ones multiply rows of no use.
    rows = min(128, max(8, 1 << max(int(average), 1).bit_length()))
    step = max(8, rows // 8)
    # Single rows go through a product that is bound by memory as one of eight is not (XLA on CPU).
    tiles = (1,) if average <= 1 else tuple(range(step, rows + 1, step))
    return jax.lax.platform_dependent(
        x,
        weights,
        sizes,
        jnp.asarray(base, jnp.int32),
        tpu=functools.partial(_tiled, activation, (rows,)) if quantized else functools.partial(_megablox, activation),
        default=functools.partial(_tiled, activation, tiles),
    )


_ROWS: Final = 128
"""The rows of a tile of megablox: the smallest that the kernel takes; groups of a decode step are smaller."""


def _megablox(activation: str, x: Array, weights: ExpertWeights, sizes: Array, base: Array) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # half a second that models without experts do not need

    rows = len(x)
    x = jnp.pad(x, ((0, -rows % _ROWS), (0, 0)))
    every = jnp.zeros(len(weights.down), jnp.int32)
    every = jax.lax.dynamic_update_slice_in_dim(every, sizes, base, axis=0)
    expert = jnp.clip(jnp.searchsorted(jnp.cumsum(every), jnp.arange(rows), side="right"), 0, len(every) - 1)

    def product(inputs: Array, weight: Array) -> Array:
        tiling = (_ROWS, *(min(size, 1024) for size in weight.shape[1:]))
        result: Array = gmm(inputs, weight, every, inputs.dtype, tiling)
        return result

    up, gate = product(x, weights.up), None if weights.gate is None else product(x, weights.gate)
    up = up if weights.up_bias is None else up.at[:rows].add(weights.up_bias[expert])
    out = product(hidden(activation, up, gate), weights.down)[:rows]
    return out if weights.down_bias is None else out + weights.down_bias[expert]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(
    activation: str, rows: tuple[int, ...], x: Array, weights: ExpertWeights, sizes: Array, base: Array
) -> Array:
    tiles = _Tiles.of(sizes, len(x), base, rows)
    padded = jnp.pad(x, ((0, rows[-1]), (0, 0)))

    def tile(index: Array, out: Array) -> Array:
        answers, _ = tiles.compute(
            index, lambda *given: (_mlp(activation, *given), ()), [tiles.take(padded, index)], weights
        )
        # Rows after the group's last are the next group's, whose tile comes later.
        return jax.lax.dynamic_update_slice_in_dim(out, answers, tiles.start[index], axis=0)

    return jax.lax.fori_loop(0, tiles.count, tile, jnp.zeros_like(padded))[: len(x)]


def _tiled_forward(activation: str, rows: tuple[int, ...], *given: Any) -> tuple[Array, Any]:
    return _tiled(activation, rows, *given), given


def _tiled_backward(
    activation: str, rows: tuple[int, ...], saved: Any, gradient: Array
) -> tuple[Array, ExpertWeights, None, None]:
    """Computes each tile again, so that nothing of the width of experts is kept; sums over tiles in float32."""
    x, weights, sizes, base = saved
    tiles = _Tiles.of(sizes, len(x), base, rows)
    padded, of_padded = (jnp.pad(each, ((0, rows[-1]), (0, 0))) for each in (x, gradient))

    def pulled(inputs: Array, of_answers: Array, *expert: Any) -> tuple[Array, list[Array]]:
        _, pull = jax.vjp(functools.partial(_mlp, activation), inputs, *expert)
        of_inputs, *of_expert = pull(of_answers)
        return of_inputs, of_expert

    def tile(index: Array, state: Any) -> Any:
        of_x, of_weights = state
        own = jnp.arange(rows[-1]) < tiles.end[index] - tiles.start[index]
        of_answers = jnp.where(own[:, None], tiles.take(of_padded, index), 0)
        of_inputs, of_expert = tiles.compute(index, pulled, [tiles.take(padded, index), of_answers], weights)
        of_x = jax.lax.dynamic_update_slice_in_dim(of_x, of_inputs, tiles.start[index], axis=0)
        expert = tiles.expert[index]
        added = jax.tree.map(lambda total, part: total.at[expert].add(part), of_weights, ExpertWeights(*of_expert))
        return of_x, added

    zeros = jnp.zeros_like(padded), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights)
    of_x, of_weights = jax.lax.fori_loop(0, tiles.count, tile, zeros)
    return of_x[: len(x)], jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), of_weights, weights), None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _mlp(activation: str, x: Array, gate: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> Array:
    inner = hidden(activation, _add(matmul(x, up), up_bias), None if gate is None else matmul(x, gate))
    return _add(matmul(inner, down), down_bias)


def _add(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Rows in tiles, each within one expert's group; the last of a group is the smallest that covers what is left."""

    rows: tuple[int, ...]
    """The sizes of tiles: multiples of the first."""
    expert: Int[Array, " tile"]
    start: Int[Array, " tile"]
    end: Int[Array, " tile"]
    """The row after the last of the tile's group."""
    count: Int[Array, ""]

    @classmethod
    def of(cls, sizes: Array, total: int, base: Array, rows: tuple[int, ...]) -> Self:
        """The tiles of groups that have ``total`` rows at most, the first of them that of the expert ``base``."""
        largest = rows[-1]
        tiles, ends = -(-sizes // largest), jnp.cumsum(sizes)
        last = jnp.cumsum(tiles)
        index = jnp.arange(min(len(sizes), total) + total // largest)
        group = jnp.minimum(jnp.searchsorted(last, index, side="right"), len(sizes) - 1)
        start = ends[group] - sizes[group] + (index - last[group] + tiles[group]) * largest
        return cls(rows, base + group, start, ends[group], last[-1])

    def take(self, x: Array, index: Array) -> Array:
        """As many rows as the largest tile has, from the beginning of a tile."""
        return jax.lax.dynamic_slice_in_dim(x, self.start[index], self.rows[-1])

    def compute[Rest](
        self, index: Array, function: Callable[..., tuple[Array, Rest]], given: list[Array], weights: ExpertWeights
    ) -> tuple[Array, Rest]:
        """The results of a function for a tile: rows, followed by zeros up to the largest tile's, and all else.

        Args:
            function: A function of the tile's rows of ``given`` and of its expert's weights.
            given: What was taken for the tile.
            weights: The weights of all experts, which are read in place.
        """
        expert = self.expert[index]
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), weights)

        def of(rows: int) -> Callable[..., tuple[Array, Rest]]:
            def run(given: list[Array], own: ExpertWeights) -> tuple[Array, Rest]:
                answers, rest = function(*(each[:rows] for each in given), *own)
                return jnp.pad(answers, ((0, self.rows[-1] - rows), (0, 0))), rest

            return run

        used = jnp.clip(self.end[index] - self.start[index], 1, self.rows[-1])
        result: tuple[Array, Rest] = jax.lax.switch((used - 1) // self.rows[0], [of(r) for r in self.rows], given, own)
        return result
