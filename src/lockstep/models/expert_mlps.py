"""The MLPs of experts over tokens grouped by expert, on plain arrays.

Nothing has a capacity and no token is dropped: what a token's experts answer does not depend on the other tokens.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.models.block import hidden
from lockstep.models.experts import Routing
from lockstep.placement import QuantizedWeight, matmul
from lockstep.placement.device import MOST_ROWS, TILE, add_blocks, barrier, elementwise, product


class ExpertWeights(NamedTuple):
    """The matrices of the experts of a layer, or of those that a device has."""

    gate: Any
    """``[expert, embed, expert_mlp]``; like the others an array or a `lockstep.placement.QuantizedWeight`. None where
    it is in ``up`` (`lockstep.models.block.clamped_swiglu`)."""
    up: Any
    """``[expert, embed, expert_mlp]``; with the gate ``[expert, embed, gate_up]``. Both may be wider than ``down``."""
    down: Any
    """``[expert, expert_mlp, embed]``."""
    up_bias: Any = None
    """``[expert, gate_up]``."""
    down_bias: Any = None
    """``[expert, embed]``; of devices that share the width of experts, one has it and the others zeros."""


class AdaptedMatrices(NamedTuple):
    """The matrices of experts with low-rank ones beside them, in place of an array: ``x weight + (x a) b``."""

    weight: Any
    """``[expert, input, output]``."""
    a: Any
    """``[expert, input, rank]``, with the scale of the adapter."""
    b: Any
    """``[expert, rank, output]``."""


class ExactSum(NamedTuple):
    """The way in which ``numerics: exact`` adds up what is here of experts (`mixture`)."""

    blocks: int
    """The blocks of the width of an expert, of those that are here."""
    devices: tuple[str, ...] = ()
    """The mesh axes of the devices that share the experts."""
    whole: bool = False
    """Whether a device has whole experts, in place of a part of the width of each."""


def mixture(
    x: Float[Array, "token embed"],
    routing: Routing,
    weights: ExpertWeights,
    activation: str,
    *,
    first: Int[Array, ""] | int = 0,
    valid: Bool[Array, " token"] | None = None,
    layer: Int[Array, ""] | None = None,
    exact: ExactSum | None = None,
) -> Float[Array, "token embed"]:
    """Return the weighted sum of what each token's experts answer.

    Args:
        weights: The experts that are on this device, or their part of ``expert_mlp``.
        first: The number of the first of them; what the others answer is not in the sum.
        valid: Which tokens matter; no expert is read for the others, whose result is 0. None for all.
        layer: The layer, where the weights are those of all layers, stacked: a slice of one would be a copy of all its
            experts, hit or not. None where they are those of one.
        exact: Says that the bits of a token depend on no other token and not on the devices, whose answers are then in
            the sum. Every device has the whole ``down_bias`` of its experts.
    """
    base: Int[Array, ""] | int = 0
    count = _shape(weights.down)[0 if layer is None else 1]
    if layer is not None:
        weights = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weights)
        base = layer * count
    local = routing.experts - first
    is_local = (local >= 0) & (local < count)
    is_local = is_local if valid is None else is_local & valid[:, None]
    group = jnp.where(is_local, local, count).reshape(-1)
    order = jnp.argsort(group, stable=True)
    sizes = jnp.diff(jnp.searchsorted(group[order], jnp.arange(count + 1))).astype(jnp.int32)
    computed = (jnp.arange(group.size) < sizes.sum())[:, None]
    rows = jnp.where(computed, x[order // routing.experts.shape[1]], 0)
    average = group.size / routing.logits.shape[-1]
    if exact is None:
        answers = grouped_mlp(rows, weights, sizes, activation, base, average=average)
    else:
        answers = _exact_answers(exact, activation, rows, weights, sizes, jnp.int32(base), average)
    answers = jnp.where(computed, answers, 0)
    answers = answers[jnp.argsort(order)].reshape(*routing.experts.shape, -1)
    if exact is not None:
        if exact.whole:  # one of the devices has the answer, and the others zeros
            answers = jax.lax.psum(answers, exact.devices)
        weighted = barrier(answers.astype(jnp.float32) * routing.weights[..., None])
        total = functools.reduce(operator.add, [weighted[:, choice] for choice in range(weighted.shape[1])])
        return jnp.asarray(barrier(barrier(total).astype(x.dtype)))
    return jnp.sum(answers.astype(jnp.float32) * routing.weights[..., None], axis=1).astype(x.dtype)


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
        base: The expert of the first group.
        average: The rows of a group where experts are used evenly.
    """
    quantized = any(isinstance(weight, QuantizedWeight) for weight in weights)
    # About the rows of a group: smaller tiles read an expert more often, larger ones multiply rows of no use.
    rows = min(128, max(8, 1 << max(int(average), 1).bit_length()))
    step = max(8, rows // 8)
    # Single rows go through a product that is bound by memory as one of eight is not (XLA on CPU); two of one expert,
    # one after the other, read its weights once.
    tiles = (1, 2) if average <= 1 else tuple(range(step, rows + 1, step))
    return jax.lax.platform_dependent(
        x,
        weights,
        sizes,
        jnp.asarray(base, jnp.int32),
        tpu=functools.partial(_tiled, activation, (rows,)) if quantized else functools.partial(_megablox, activation),
        default=functools.partial(_tiled, activation, tiles),
    )


def _exact_answers(
    exact: ExactSum, activation: str, x: Array, weights: ExpertWeights, sizes: Array, base: Array, average: float
) -> Array:
    def mlp(inputs: Array, expert: ExpertWeights) -> Array:
        def times(weight: Array) -> Array:
            return jnp.asarray(barrier(product(inputs, weight, columns=exact.blocks).astype(inputs.dtype)))

        up, gate = _add(times(expert.up), expert.up_bias), None if expert.gate is None else times(expert.gate)
        inner = barrier(hidden(activation, barrier(up), gate, elementwise=elementwise))
        return product(inner[:, : len(expert.down)], expert.down, inner=exact.blocks)

    rows = min(MOST_ROWS, max(TILE, 1 << int(average).bit_length()))
    step = max(TILE, rows // 2)
    part = _by_tile(mlp, tuple(range(step, rows + 1, step)), x, weights, sizes, base, jnp.dtype(jnp.float32))
    if exact.devices and not exact.whole:
        part = add_blocks(jax.lax.all_gather(part, exact.devices))
    answers = barrier(part.astype(x.dtype))
    if weights.down_bias is None:
        return jnp.asarray(answers)
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
    return jnp.asarray(barrier(answers + weights.down_bias[base + jnp.minimum(expert, len(sizes) - 1)]))


_ROWS: Final = 128
"""The rows of a tile of megablox: the smallest that the kernel takes; groups of a decode step are smaller."""


_LARGEST_SIDE: Final = 1024
"""The largest side of a tile of an expert's matrix."""


def _tiling(rows: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """The tile of a product, or of one of its gradients: a small side, such as a rank, is whole.

    Tiles of a larger side are about equal: the kernel multiplies the last one whole, whatever is left for it (1024 and
    1024 for a width of 1408, DeepSeek V2-Lite's, were 45 % more than it has; 768 and 768 are 9 %).
    """
    del rows

    def side(size: int) -> int:
        tiles = -(-size // _LARGEST_SIDE)
        return size if tiles == 1 else -(-size // (tiles * 128)) * 128

    return _ROWS, side(inputs), side(outputs)


def _megablox(activation: str, x: Array, weights: ExpertWeights, sizes: Array, base: Array) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # half a second that models without experts do not need

    rows = len(x)
    x = jnp.pad(x, ((0, -rows % _ROWS), (0, 0)))
    every = jnp.zeros(_shape(weights.down)[0], jnp.int32)
    every = jax.lax.dynamic_update_slice_in_dim(every, sizes, base, axis=0)
    expert = jnp.clip(jnp.searchsorted(jnp.cumsum(every), jnp.arange(rows), side="right"), 0, len(every) - 1)

    def grouped(inputs: Array, weight: Array) -> Array:
        result: Array = gmm(inputs, weight, every, inputs.dtype, _tiling)
        return result

    product = functools.partial(_product, multiply=grouped)
    up, gate = product(x, weights.up), None if weights.gate is None else product(x, weights.gate)
    up = up if weights.up_bias is None else up.at[:rows].add(weights.up_bias[expert])
    out = product(hidden(activation, up, gate)[:, : _shape(weights.down)[1]], weights.down)[:rows]
    return out if weights.down_bias is None else out + weights.down_bias[expert]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(
    activation: str, rows: tuple[int, ...], x: Array, weights: ExpertWeights, sizes: Array, base: Array
) -> Array:
    def mlp(inputs: Array, expert: ExpertWeights) -> Array:
        parts = jnp.split(inputs, len(inputs) if len(inputs) == 2 else 1)
        return jnp.concatenate([_mlp(activation, part, *expert) for part in parts])

    return _by_tile(mlp, rows, x, weights, sizes, base, x.dtype)


def _by_tile(
    mlp: Callable[[Array, ExpertWeights], Array],
    rows: tuple[int, ...],
    x: Array,
    weights: ExpertWeights,
    sizes: Array,
    base: Array,
    dtype: jnp.dtype,
) -> Array:
    """Return ``mlp(inputs, expert)`` of each tile of rows, in a dtype."""
    tiles = _Tiles.of(sizes, len(x), base, rows)
    padded = jnp.pad(x, ((0, rows[-1]), (0, 0)))

    def tile(index: Array, out: Array) -> Array:
        def answer(rows: int, out: Array) -> Array:
            answers = mlp(tiles.take(padded, index, rows), tiles.expert_of(weights, index))
            # Rows after the group's last are the next group's, whose tile comes later.
            return jax.lax.dynamic_update_slice_in_dim(out, answers, tiles.start[index], axis=0)

        return tiles.switch(index, answer, out)

    return jax.lax.fori_loop(0, tiles.count, tile, jnp.zeros(padded.shape, dtype))[: len(x)]


def _tiled_forward(activation: str, rows: tuple[int, ...], *arrays: Any) -> tuple[Array, Any]:
    return _tiled(activation, rows, *arrays), arrays


def _tiled_backward(
    activation: str, rows: tuple[int, ...], saved: Any, gradient: Array
) -> tuple[Array, ExpertWeights, None, None]:
    """Compute each tile again, so that nothing of the width of experts is kept; sums over tiles in float32."""
    x, weights, sizes, base = saved
    tiles = _Tiles.of(sizes, len(x), base, rows)
    padded, of_padded = (jnp.pad(array, ((0, rows[-1]), (0, 0))) for array in (x, gradient))

    def tile(index: Array, state: Any) -> Any:
        of_x, of_weights = state

        def pull(rows: int, of_x: Array) -> tuple[Array, Sequence[Array | None]]:
            inputs, of_answers = (tiles.take(array, index, rows) for array in (padded, of_padded))
            own = jnp.arange(rows) < tiles.end[index] - tiles.start[index]
            expert = tiles.expert_of(weights, index)
            of_inputs, *of_expert = jax.vjp(functools.partial(_mlp, activation), inputs, *expert)[1](
                jnp.where(own[:, None], of_answers, 0)
            )
            return jax.lax.dynamic_update_slice_in_dim(of_x, of_inputs, tiles.start[index], axis=0), of_expert

        of_x, of_expert = tiles.switch(index, pull, of_x)
        expert = tiles.expert[index]
        added = jax.tree.map(lambda total, part: total.at[expert].add(part), of_weights, ExpertWeights(*of_expert))
        return of_x, added

    zeros = jnp.zeros_like(padded), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights)
    of_x, of_weights = jax.lax.fori_loop(0, tiles.count, tile, zeros)
    return of_x[: len(x)], jax.tree.map(lambda leaf, weight: leaf.astype(weight.dtype), of_weights, weights), None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _mlp(activation: str, x: Array, gate: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> Array:
    inner = hidden(activation, _add(_product(x, up), up_bias), None if gate is None else _product(x, gate))
    return _add(_product(inner[:, : _shape(down)[-2]], down), down_bias)


def _product(x: Array, weight: Any, multiply: Callable[[Array, Any], Array] = matmul) -> Array:
    if isinstance(weight, AdaptedMatrices):
        return multiply(x, weight.weight) + multiply(multiply(x, weight.a), weight.b)
    return multiply(x, weight)


def _shape(weight: Any) -> tuple[int, ...]:
    """The shape of a matrix without what is beside it."""
    shape: tuple[int, ...] = jax.tree.leaves(weight)[0].shape
    return shape


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

    def take(self, x: Array, index: Array, rows: int) -> Array:
        """The first rows of a tile."""
        return jax.lax.dynamic_slice_in_dim(x, self.start[index], rows)

    def expert_of(self, weights: ExpertWeights, index: Array) -> ExpertWeights:
        """The weights of a tile's expert, of those of all experts."""
        expert = self.expert[index]
        own: ExpertWeights = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), weights
        )
        return own

    def switch[State, Result](self, index: Array, function: Callable[[int, State], Result], state: State) -> Result:
        """Return ``function(rows, state)`` with the smallest size of tiles that covers the rows of a tile.

        Rows are read and written within the branch: in place, and no more of them than it computes.
        """
        used = jnp.clip(self.end[index] - self.start[index], 1, self.rows[-1])
        branches = [functools.partial(function, rows) for rows in self.rows]
        result: Result = jax.lax.switch((used - 1) // self.rows[0], branches, state)
        return result
