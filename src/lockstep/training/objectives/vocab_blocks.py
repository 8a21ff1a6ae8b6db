"""Log-probabilities and entropies from hidden states and an output layer, the logits of a block of ids at a time."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Final, Self

import haliax as hax
import jax
import jax.numpy as jnp
from haliax.partitioning import physical_axis_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from lockstep.placement import PARAMETER_AXES, axes_of
from lockstep.placement.device import auto_axes
from lockstep.training.objectives.softmax import LOWEST, SoftmaxSums, softmax_inputs, weighted
from lockstep.training.objectives.targets import NO_TARGET, for_targets

LANES: Final = 128  # blocks are a multiple of this many token ids, the width of a TPU's tile

LEAST: Final = 4096
"""Token ids that a block has at least: each block's product is added to the gradient of all hidden states."""

_ROW_MAJOR: Final = Layout((0, 1))


def logits_fit(tokens: int, vocab: int, *, most: int) -> bool:
    """Whether a device may have all its logits and their gradients at once.

    Args:
        tokens: The number of tokens of a device's microbatch.
        vocab: The number of token ids whose logits a device makes.
        most: The bytes of float32 logits and of their gradients that a device may have.
    """
    return _bytes(tokens, vocab) <= most


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabBlocks:
    """The log-probability of one token id per hidden state: its logit less the log-sum-exp of all, in float32.

    The log-sum-exp is summed block by block (Milakov & Gimelshein 2018, arXiv 1805.02867, algorithm 3), and with it the
    entropy, where that is asked for. The backward pass computes the logits of each block again; a block's part of the
    output layer's gradient is final when it is made. A device computes its own rows: it gathers the output layer once
    for both passes.

    Args:
        gathered: The mesh axes that split each axis of the output layer between steps, beyond ``vocab``.
        targets_only: Whether there are tokens without a target (`NO_TARGET`), whose results are 0.
    """

    size: int  # number of token ids in a block on a device
    vocab_first: bool  # whether the output layer is `[vocab, embed]` rather than `[embed, vocab]`
    soft_cap: float | None  # the soft cap of the logits; None for none
    temperature: float = 1.0  # what the logits are divided by, after the soft cap
    vocab_size: int | None = None  # number of ids that are tokens, from 0; None for all
    mesh: AbstractMesh | None = None  # the mesh; None: all is on one device, or XLA divides the work
    rows: tuple[str, ...] = ()  # the mesh axes that split the rows
    positions: tuple[str, ...] = ()  # the mesh axes that split the positions of a row
    vocab: tuple[str, ...] = ()  # the mesh axes that split the vocabulary, for the computation
    gathered: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    targets_only: bool = False

    @classmethod
    def of(
        cls,
        states: hax.NamedArray,
        head: hax.NamedArray,
        soft_cap: float | None,
        *,
        most: int,
        least: int = LEAST,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        targets_only: bool = False,
    ) -> Self | None:
        """Choose the blocks, for the mesh and the axis mapping that are set.

        Args:
            most: The bytes of float32 logits and of their gradients that a device may have at once. A block has at most
                a quarter of it, unless ``least`` token ids are more.
            least: The number of token ids that a block has at least.
            temperature: What the logits are divided by, after the soft cap.
            vocab_size: The number of ids that are tokens, from 0; None for all.
            targets_only: Whether there may be tokens without a target.

        Returns:
            The blocks; None where all logits are no more than that.
        """
        context = jax.sharding.get_abstract_mesh()
        mesh: AbstractMesh | None = context
        rows, positions, split = (axes_of(physical_axis_name(name)) for name in ("batch", "position", "vocab"))
        stored = [axes_of(PARAMETER_AXES.get(axis.name)) for axis in head.axes]
        gathered = tuple(tuple(axis for axis in axes if axis not in split) for axes in stored)
        # Without the mesh and the mapping of a train step, XLA divides the work.
        if not (rows and {*rows, *split} <= set(context.axis_names) and {*itertools.chain(*gathered)} <= set(rows)):
            mesh, rows, positions, split, gathered = None, (), (), (), ((), ())
        vocab = head.resolve_axis("vocab").size // _size(mesh, split)
        tokens = math.prod(axis.size for axis in states.axes if axis.name != "embed") // _size(
            mesh, (*rows, *positions)
        )
        if logits_fit(tokens, vocab, most=most):
            return None
        return cls(
            size=min(vocab, max(least, most // 4 // _bytes(tokens, LANES) * LANES)),
            vocab_first=head.axes[0].name == "vocab",
            soft_cap=soft_cap,
            temperature=temperature,
            vocab_size=vocab_size,
            mesh=mesh,
            rows=rows,
            positions=positions,
            vocab=split,
            gathered=(gathered[0], gathered[1]),
            targets_only=targets_only,
        )

    def __call__(
        self,
        states: Float[Array, "row position embed"],
        head: Float[Array, "embed vocab"] | Float[Array, "vocab embed"],
        targets: Int[Array, "row position"],
    ) -> Float[Array, "row position"]:
        """Return the log-probability of each target in float32. Gradients are in the dtype of what they are of.

        Args:
            head: The output layer, as stored between steps.
        """
        return self._run(states, head, targets, entropy=False)[0]

    def with_entropy(
        self,
        states: Float[Array, "row position embed"],
        head: Float[Array, "embed vocab"] | Float[Array, "vocab embed"],
        targets: Int[Array, "row position"],
    ) -> tuple[Float[Array, "row position"], Float[Array, "row position"]]:
        """Return the log-probability of each target, and the entropy in nats of the distribution that it is of."""
        logprobs, entropy = self._run(states, head, targets, entropy=True)
        assert entropy is not None
        return logprobs, entropy

    def _run(self, states: Array, head: Array, targets: Array, *, entropy: bool) -> tuple[Array, Array | None]:
        logprobs, entropies = _logprobs(states, head, targets, self, entropy)
        return logprobs, entropies

    @property
    def axis(self) -> int:
        """The axis of the vocabulary in the output layer."""
        return 0 if self.vocab_first else 1

    def spec(self, *, stored: bool) -> P:
        """Return how the output layer is split over the mesh: between steps, or for the computation."""
        extra = self.gathered if stored else ((), ())
        used = [self.vocab if axis == self.axis else () for axis in (0, 1)]
        return P(*((*a, *b) or None for a, b in zip(used, extra, strict=True)))

    def for_tokens(
        self, function: Callable[..., tuple[Any, Any]], targets: Array, *columns: Array | None
    ) -> tuple[Any, Any]:
        """Call a function with targets and columns of a device's tokens, as one axis, see `for_targets`."""
        tokens = jax.tree.map(lambda column: column.reshape(-1, *column.shape[targets.ndim :]), (targets, *columns))
        return for_targets(function, *tokens) if self.targets_only else function(*tokens)

    def on_devices(
        self, function: Callable[..., Any], *, inputs: tuple[P | None, ...], outputs: Any
    ) -> Callable[..., Any]:
        """Return a function that each device runs on its own part of the arrays."""
        if self.mesh is None:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=inputs,
            out_specs=outputs,
            axis_names=auto_axes(self.mesh),
            check_vma=False,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _logprobs(
    states: Array, head: Array, targets: Array, blocks: VocabBlocks, entropy: bool
) -> tuple[Array, Array | None]:
    return _forward(states, head, targets, blocks, entropy)[0]


def _forward(
    states: Array, head: Array, targets: Array, blocks: VocabBlocks, entropy: bool
) -> tuple[tuple[Array, Array | None], tuple[Array | None, ...]]:
    def local(states: Array, head: Array, targets: Array) -> tuple[Array, Array, Array | None, Array]:
        head = _gather(head, blocks)
        vocab = head.shape[blocks.axis]

        def of_tokens(ids: Array, x: Array) -> tuple[tuple[SoftmaxSums, Array], None]:
            def add(index: Array, sums: tuple[SoftmaxSums, Array]) -> tuple[SoftmaxSums, Array]:
                before, picked = sums
                block = _Block.of(index, head, blocks)
                scores = jnp.where(block.fresh, block.scores(block.logits(x)), LOWEST)
                higher = jnp.maximum(before.highest, jnp.max(scores, axis=-1))
                after = before.below(higher)
                distance = scores - higher[:, None]
                exponentials = jnp.exp(distance)
                total = after.total + jnp.sum(exponentials, axis=-1)
                slant = after.slant
                slant = None if slant is None else slant + jnp.sum(weighted(exponentials, distance), axis=-1)
                return SoftmaxSums(higher, total, slant), picked + jnp.sum(
                    jnp.where(block.hit(ids), scores, 0.0), axis=-1
                )

            nothing = jnp.zeros(len(x), jnp.float32)
            empty = SoftmaxSums(jnp.full_like(nothing, LOWEST), nothing, nothing if entropy else None)
            return jax.lax.fori_loop(0, _count(vocab, blocks), add, (empty, nothing)), None

        (sums, picked), _ = blocks.for_tokens(of_tokens, targets, states)
        if blocks.vocab:
            sums = sums.below(jax.lax.pmax(sums.highest, blocks.vocab))
            total, slant, picked = jax.lax.psum((sums.total, sums.slant, picked), blocks.vocab)
            sums = SoftmaxSums(sums.highest, total, slant)
        total = sums.total
        if blocks.targets_only:  # all is 0 without a target
            total = jnp.where(targets.reshape(-1) == NO_TARGET, 1.0, total)
        log_total = jnp.log(total)
        sum_exp = sums.highest + log_total
        entropies = None if sums.slant is None else (log_total - sums.slant / total).reshape(targets.shape)
        return (picked - sum_exp).reshape(targets.shape), sum_exp.reshape(targets.shape), entropies, head

    rows, used = P(blocks.rows or None, blocks.positions or None), blocks.spec(stored=False)
    run = blocks.on_devices(
        local,
        inputs=(rows, blocks.spec(stored=True), rows),
        outputs=(rows, rows, rows if entropy else None, used),
    )
    logprobs, sum_exp, entropies, whole = run(states, head, targets)
    return (logprobs, entropies), (states, whole, targets, sum_exp, entropies)


def _backward(
    blocks: VocabBlocks, entropy: bool, kept: tuple[Array | None, ...], gradients: tuple[Array, Array | None]
) -> tuple[Array, Array, None]:
    def local(
        states: Array, head: Array, targets: Array, sum_exp: Array, entropies: Array | None,
        gradient: Array, of_entropies: Array | None,
    ) -> tuple[Array, Array]:  # fmt: skip
        vocab = head.shape[blocks.axis]

        def of_tokens(
            ids: Array, x: Array, sums: Array, entropies: Array | None, gradient: Array, of_entropies: Array | None
        ) -> tuple[Array, Array]:
            weights, sums = gradient[:, None] / blocks.temperature, sums[:, None]

            def add(index: Array, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
                of_x, of_head = gradients
                block = _Block.of(index, head, blocks)
                logits = block.logits(x)
                logprobs = block.scores(logits) - sums
                probabilities = jnp.exp(logprobs)
                slope = weights * (block.hit(ids) - probabilities)
                if entropies is not None and of_entropies is not None:
                    spread = weighted(probabilities, logprobs) + probabilities * entropies[:, None]
                    slope -= of_entropies[:, None] / blocks.temperature * spread
                if blocks.soft_cap is not None:
                    slope = slope * (1.0 - jnp.square(logits / blocks.soft_cap))
                counted = block.fresh & (ids != NO_TARGET)[:, None] if blocks.targets_only else block.fresh
                # As in the model's own output layer: a float32 gradient would double what devices exchange.
                slope = jnp.where(counted, slope, 0.0).astype(x.dtype)
                of_x += jnp.dot(slope, block.columns.T, preferred_element_type=jnp.float32)
                of_block = jnp.dot(x.T, slope)
                of_block = of_block.T if blocks.vocab_first else of_block
                if vocab % blocks.size:  # the last block begins inside the one before it
                    of_block += jax.lax.dynamic_slice_in_dim(of_head, block.start, blocks.size, blocks.axis)
                of_head = jax.lax.dynamic_update_slice_in_dim(of_head, of_block, block.start, blocks.axis)
                # A v6e makes the product transposed: XLA copied each block twice, or on one chip the whole at the end.
                return of_x, with_layout_constraint(of_head, _ROW_MAJOR)

            empty = (jnp.zeros(x.shape, jnp.float32), jnp.zeros_like(head))
            of_x, of_head = jax.lax.fori_loop(0, _count(vocab, blocks), add, empty)
            return of_x.astype(x.dtype), of_head

        of_x, of_head = blocks.for_tokens(of_tokens, targets, states, sum_exp, entropies, gradient, of_entropies)
        of_x = jax.lax.psum(of_x, blocks.vocab) if blocks.vocab else of_x
        return of_x.reshape(states.shape), _scatter(of_head, blocks)

    rows = P(blocks.rows or None, blocks.positions or None)
    per_token = rows if entropy else None
    run = blocks.on_devices(
        local,
        inputs=(rows, blocks.spec(stored=False), rows, rows, per_token, rows, per_token),
        outputs=(rows, blocks.spec(stored=True)),
    )
    of_states, of_head = run(*kept, *gradients)
    return of_states, of_head, None


_logprobs.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """A block of a device's vocabulary.

    Args:
        start: The first token id, counted on the device.
        ids: The token ids, counted over all devices.
        columns: The part of the output layer ``[embed, block]``.
        fresh: False for the token ids that an earlier block has.
        blocks: All of the blocks.
    """

    start: Array
    ids: Array
    columns: Array
    fresh: Array
    blocks: VocabBlocks

    @classmethod
    def of(cls, index: Array, head: Array, blocks: VocabBlocks) -> Self:
        vocab = head.shape[blocks.axis]
        start = jnp.minimum(index * blocks.size, vocab - blocks.size)
        local = start + jnp.arange(blocks.size)
        columns = jax.lax.dynamic_slice_in_dim(head, start, blocks.size, blocks.axis)
        before = jax.lax.axis_index(blocks.vocab) * vocab if blocks.vocab else 0
        return cls(
            start=start,
            ids=before + local,
            columns=columns.T if blocks.vocab_first else columns,
            fresh=local >= index * blocks.size,
            blocks=blocks,
        )

    def logits(self, x: Array) -> Array:
        """Return ``[token, block]`` in float32."""
        logits = jnp.dot(x, self.columns, preferred_element_type=jnp.float32)
        cap = self.blocks.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def scores(self, logits: Array) -> Array:
        """Return what the softmax is of, from what `logits` returned."""
        return softmax_inputs(logits, self.ids, self.blocks.temperature, self.blocks.vocab_size)

    def hit(self, targets: Array) -> Array:
        """Return where a token id of the block is the target ``[token, block]``."""
        return (self.ids == targets[:, None]) & self.fresh


def _bytes(tokens: int, vocab: int) -> int:
    return 2 * 4 * tokens * vocab


def _count(vocab: int, blocks: VocabBlocks) -> int:
    return -(-vocab // blocks.size)


def _gather(head: Array, blocks: VocabBlocks) -> Array:
    for axis, names in enumerate(blocks.gathered):
        # With one device a gather is a copy.
        split = _size(blocks.mesh, names) > 1
        head = jax.lax.all_gather(head, names, axis=axis, tiled=True) if split else head
    return head


def _scatter(of_head: Array, blocks: VocabBlocks) -> Array:
    """Return a device's part of the sum over all rows, as the output layer is stored."""
    for axis, names in enumerate(blocks.gathered):
        split = _size(blocks.mesh, names) > 1
        of_head = jax.lax.psum_scatter(of_head, names, scatter_dimension=axis, tiled=True) if split else of_head
    scattered = {*itertools.chain(*blocks.gathered)}
    copies = tuple(
        name for name in (*blocks.rows, *blocks.positions) if name not in scattered and _size(blocks.mesh, (name,)) > 1
    )
    of_head = jax.lax.psum(of_head, copies) if copies else of_head
    # XLA would else add up the whole of it in float32 over microbatches, on every device, and exchange that at the end.
    return jax.lax.optimization_barrier(of_head)


def _size(mesh: AbstractMesh | None, axes: tuple[str, ...]) -> int:
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)
