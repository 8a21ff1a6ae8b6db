"""The states of sequences whose model has linear attention: arrays beside the pages, with a place for each slot."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from lockstep.engine.schedule import Capacity
from lockstep.models import LinearAttention, LlamaConfig
from lockstep.models.attention.kv import FixedState
from lockstep.models.delta_rule import DeltaGates, DeltaState, gated_delta
from lockstep.placement import DecodeMesh

type Recur = Callable[[Any, Array, Array, Array, DeltaGates], tuple[Array, Any]]
"""Takes the cache, the place of a layer among those with linear attention, and the arguments of
`lockstep.models.layers.Recur`; returns what positions read, and the cache."""


class KvAndStates(NamedTuple):
    """The past of all sequences of a replica."""

    kv: Any
    """The pool of pages, or what attention makes of it for a launch."""
    states: DeltaState | None = None
    """The state of slot ``s`` in the i-th layer with linear attention is entry ``i * slots + s``; None without any."""

    @classmethod
    def of(cls, pool: Any) -> "KvAndStates":
        """The past that a program is given."""
        return pool if isinstance(pool, KvAndStates) else cls(pool)

    @property
    def pool(self) -> Any:
        """The past as a program returns it: that of a model without linear attention is the pool alone."""
        return self.kv if self.states is None else self


def state_structs(config: LlamaConfig, capacity: Capacity, decode_mesh: DecodeMesh, dtype: jnp.dtype) -> Any:
    """The shapes and shardings of the states of all replicas; None where the model has none.

    Args:
        dtype: The type of activations.
    """
    if (of := config.linear_attention) is None:
        return None
    rows = decode_mesh.replicas * len(config.linear_layers) * capacity.slots
    shapes = jax.eval_shape(functools.partial(DeltaState.zeros, of, rows, of.key_heads, dtype))
    replicas, heads = decode_mesh.replica_axes or None, decode_mesh.tensor_axes or None
    shardings = (decode_mesh.sharding(replicas, None, heads), decode_mesh.sharding(replicas, heads))
    structs: Any = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(shapes, shardings, strict=True)
    ]
    return DeltaState(*structs)


def state_spec(config: LlamaConfig, tensor: int, dtype: jnp.dtype) -> FixedState | None:
    """The state of a layer with linear attention on one device of ``tensor``; None where the model has none.

    Args:
        dtype: The type of activations.
    """
    if (of := config.linear_attention) is None:
        return None
    heads = of.key_heads // tensor
    state = jax.eval_shape(functools.partial(DeltaState.zeros, of, 1, heads, dtype))
    size = f"{of.key_head_dim} x {of.value_head_dim}"
    return FixedState(
        name=f"a state of {heads * of.group} heads of {size}",
        bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in state),
    )


def step(of: LinearAttention, position: Int[Array, " slot"], active: Array) -> Recur:
    """The recurrence of a decode step, in which each active slot has one position; the first has no past."""

    def recur(cache: KvAndStates, layer: Array, inputs: Array, taps: Array, gates: DeltaGates) -> tuple[Array, Any]:
        slots = len(position)
        own = _fresh(position == 0, _part(cache.states, layer * slots, slots))
        out, new = gated_delta(of, inputs, taps, gates, own, count=active.astype(jnp.int32))
        return out, cache._replace(states=_put(cache.states, new, layer * slots))

    return recur


def rows(
    of: LinearAttention, slots: int, slot: Int[Array, " row"], start: Int[Array, " row"], count: Int[Array, " row"]
) -> Recur:
    """The recurrence of a prefill, whose rows are pages of prompts, those of a sequence in their order.

    Args:
        slots: The slots of a replica.
        slot: The slot of each row's sequence.
        start: The position of each row's first token.
        count: The tokens of each row that decode does not read again; 0 for a row that is not used.
    """

    def recur(cache: KvAndStates, layer: Array, inputs: Array, taps: Array, gates: DeltaGates) -> tuple[Array, Any]:
        def page(states: Any, row: tuple[Array, ...]) -> tuple[Any, Array]:
            inputs, *gates, slot, start, count = (part[None] for part in row)
            place = layer * slots + slot[0]
            before = _part(states, place, 1)
            out, after = gated_delta(of, inputs, taps, DeltaGates(*gates), _fresh(start == 0, before), count=count)
            kept = jax.tree.map(lambda new, old: jnp.where(count[0] > 0, new, old), after, before)
            return _put(states, kept, place), out[0]

        states, out = jax.lax.scan(page, cache.states, (inputs, *gates, slot, start, count))
        return out, cache._replace(states=states)

    return recur


def _part(states: Any, first: Array, count: int) -> DeltaState:
    part: DeltaState = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), states)
    return part


def _put(states: Any, part: DeltaState, first: Array) -> DeltaState:
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
    whole: DeltaState = jax.tree.map(lambda leaf, new: put(leaf, new.astype(leaf.dtype)), states, part)
    return whole


def _fresh(first: Array, states: DeltaState) -> DeltaState:
    """The states, without a past where a sequence begins: whatever an earlier one has left."""
    empty: DeltaState = jax.tree.map(lambda leaf: jnp.where(first.reshape(-1, *[1] * (leaf.ndim - 1)), 0, leaf), states)
    return empty
