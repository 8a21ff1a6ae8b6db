"""Attention of layers whose heads differ, over one pool: a position's numbers are seen as the heads of its layer.

All layers have pages of one size, so that a sequence has the same page numbers in each of them, and prefixes, drafts
and copies need to know nothing of the difference. A position's rows are those of the layers that keep most; what others
keep lies at their beginning, in rows of their own size, and the rest is not used (`PagedKv.holding`). A decode launch
copies what it reads into K and V of the heads' own shapes.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from lockstep.models.attention.contiguous_kv import Context, extend_context, gather_context
from lockstep.models.attention.kv import PagedKv
from lockstep.models.attention.page_ops import as_rows, to_pool
from lockstep.models.attention.xla import Rows, XlaAttention

type Cache = tuple[Array, tuple[Context, ...]]
"""The pool, and the contiguous context of the launch in the layers of each kind of heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionByHeads:
    """`Attention` of layers whose heads differ, which it knows by the shapes of their queries, keys and values.

    Args:
        by_layer: The attention of each layer.
    """

    by_layer: tuple[XlaAttention, ...]

    @property
    def kinds(self) -> tuple[XlaAttention, ...]:
        """The attention of each kind of heads."""
        return tuple(dict.fromkeys(self.by_layer))

    @property
    def stored_kv_heads(self) -> PagedKv:
        return max((kind.stored_kv_heads for kind in self.kinds), key=lambda kept: math.prod(kept.shape))

    def pack(self, kv: Array) -> Array:
        return as_rows(kv, self.stored_kv_heads.shape)

    def write_pages(self, pool: Array, page: Array, kv: Array) -> Array:
        return self.kinds[0].write_pages(pool, page, self.pack(kv))

    def copy_pages(self, pool: Array, source: Array, target: Array) -> Array:
        return self.kinds[0].copy_pages(pool, source, target)

    def begin_decode(self, pool: Array, page_table: Array, position: Array, num_layers: int) -> Cache:
        contexts = (
            gather_context(pool, page_table, position, num_layers, kind._read_parts, self._layers(kind))
            for kind in self.kinds
        )
        return pool, tuple(contexts)

    def end_decode(self, cache: Cache) -> Array:
        return cache[0]

    def write(self, cache: Cache, layer: Array, page: Array, position: Array, kv: Array) -> Cache:
        pool, contexts = cache
        number = next(number for number, kind in enumerate(self.kinds) if kind.heads.kept.shape == kv.shape[-2:])
        context = extend_context(contexts[number], self._place(number, layer), kv, position)
        pool = pool.at[page, position % pool.shape[1]].set(to_pool(self.pack(kv), pool.dtype))
        return pool, (*contexts[:number], context, *contexts[number + 1 :])

    def decode(
        self, q: Array, cache: Cache, layer: Array, page_table: Array, position: Array, active: Array,
        sinks: Array | None = None,
    ) -> Any:  # fmt: skip
        number = self._number(q)
        own = cache[0], cache[1][number]
        return self.kinds[number].decode(q, own, self._place(number, layer), page_table, position, active, sinks)

    def begin_prefill(self, start: Array, page_table: Array, used: Array) -> Rows:
        return start, page_table

    def prefill(
        self, q: Array, pool: Array, layer: Array, first_page: Array, rows: Rows, sinks: Array | None = None
    ) -> Any:
        return self.kinds[self._number(q)].prefill(q, pool, layer, first_page, rows, sinks)

    def _number(self, q: Array) -> int:
        """The kind of the heads of queries."""
        heads = (kind.heads for kind in self.kinds)
        shapes = [(own.kv_heads, own.group, own.head_size) for own in heads]
        return next(number for number, shape in enumerate(shapes) if shape == q.shape[-3:])

    def _layers(self, kind: XlaAttention) -> tuple[int, ...]:
        return tuple(layer for layer, own in enumerate(self.by_layer) if own == kind)

    def _place(self, number: int, layer: Array) -> Array:
        """The place of a layer among those of its kind."""
        layers = self._layers(self.kinds[number])
        places = [layers.index(own) if own in layers else 0 for own in range(len(self.by_layer))]
        return jnp.asarray(places)[layer]
