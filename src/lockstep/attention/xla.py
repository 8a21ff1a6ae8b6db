"""Attention in plain JAX: on CPU, for heads that the TPU kernel does not take, and wherever there is no kernel."""

import dataclasses

from jaxtyping import Array

from lockstep.attention.base import Heads, StoredKvHeads
from lockstep.attention.contiguous_kv import Context, attend_context, extend_context, gather_context
from lockstep.attention.page_ops import TakePages, copy_pages, gather_pages, put_pages, take_pages
from lockstep.attention.quantized_kv import SCALE_BYTES, quantise
from lockstep.attention.reference import paged_attention

type Cache = tuple[Array, Context]
type Rows = tuple[Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainAttention:
    """`Attention` that lays the context of each slot out once per decode launch.

    Args:
        heads: of a device.
        int8: keep K and V in 8 bits, in the pool and in what is laid out. They are rounded once, when they are written,
            and whoever reads them, in prefill, score or decode, reads the same numbers.
        page_by_page: read and write whole pages one at a time, which the TPU compiler does in place; else all at once.
    """

    heads: Heads
    int8: bool = False
    page_by_page: bool = False

    @property
    def stored(self) -> StoredKvHeads:
        """The model's own; in 8 bits each with its scale."""
        return StoredKvHeads(kv_heads=self.heads.kv_heads, head_size=self.heads.head_size + SCALE_BYTES * self.int8)

    @property
    def _take(self) -> TakePages:
        return take_pages if self.page_by_page else gather_pages

    def pack(self, kv: Array) -> Array:
        """As it is, or rounded."""
        return quantise(kv) if self.int8 else kv

    def write_pages(self, pool: Array, page: Array, kv: Array) -> Array:
        """One scatter, or `put_pages`."""
        if self.page_by_page:
            return put_pages(pool, page, self.pack(kv))
        return pool.at[page].set(self.pack(kv).astype(pool.dtype))

    def copy_pages(self, pool: Array, source: Array, target: Array) -> Array:
        """One gather and one scatter, or `lockstep.attention.page_ops.copy_pages`."""
        if self.page_by_page:
            return copy_pages(pool, source, target)
        return pool.at[target].set(pool[source])

    def begin_decode(self, pool: Array, page_table: Array, position: Array, num_layers: int) -> Cache:
        """The pool, and its pages laid end to end."""
        return pool, gather_context(pool, page_table, position, num_layers, self._take)

    def end_decode(self, cache: Cache) -> Array:
        """The pool."""
        return cache[0]

    def write(self, cache: Cache, layer: Array, page: Array, position: Array, kv: Array) -> Cache:
        """To the pool and to the context."""
        pool, context = cache
        packed, at = self.pack(kv), (page, position % pool.shape[1])
        return pool.at[at].set(packed.astype(pool.dtype)), extend_context(context, layer, packed, position)

    def decode(self, q: Array, cache: Cache, layer: Array, page_table: Array, position: Array, active: Array) -> Array:
        """`attend_context`."""
        return attend_context(q, cache[1], layer, position, self.heads.scores)

    def arrange(self, start: Array, page_table: Array, used: Array) -> Rows:
        """Nothing to work out."""
        return start, page_table

    def prefill(self, q: Array, pool: Array, first_page: Array, rows: Rows) -> Array:
        """`paged_attention`."""
        start, page_table = rows
        return paged_attention(q, pool, first_page + page_table, start, self.heads.scores, self._take)
