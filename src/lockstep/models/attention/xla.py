"""Attention in plain JAX, compiled by XLA: on CPU and GPU, and on TPU for heads that the kernel does not take."""

import dataclasses
from typing import Any

from jaxtyping import Array

from lockstep.models.attention.base import Heads
from lockstep.models.attention.contiguous_kv import (
    Context,
    attend_context,
    extend_context,
    gather_context,
)
from lockstep.models.attention.kv import PagedKv
from lockstep.models.attention.page_ops import (
    copy_pages_one_by_one,
    gather_kv,
    keys_and_values,
    read_kv_page_by_page,
    to_pool,
    write_pages_one_by_one,
)
from lockstep.models.attention.reference import paged_attention

type Cache = tuple[Array, Context]
"""The pool, and the contiguous context of the launch."""
type Rows = tuple[Array, Array]
"""The start and the page table of each row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaAttention:
    """`Attention` that gathers the context of each slot once per decode launch.

    Args:
        page_by_page: Whether whole pages are read and written one at a time, which the TPU compiler does in place; else
            all at once.
        partial: Whether there are more positions on other devices; it returns `Partial` then.
    """

    heads: Heads
    page_by_page: bool = False
    partial: bool = False

    @property
    def stored_kv_heads(self) -> PagedKv:
        return self.heads.kept

    def _read_parts(self, pool: Array, page: Array) -> tuple[Array, ...]:
        read = read_kv_page_by_page if self.page_by_page else gather_kv
        return read(pool, page, self.heads.kept.parts, self.heads.kept.shape)

    def _read_kv(self, pool: Array, page: Array) -> tuple[Array, Array]:
        return keys_and_values(self._read_parts(pool, page), self.heads.kept.value_size)

    def pack(self, kv: Array) -> Array:
        return kv

    def write_pages(self, pool: Array, page: Array, kv: Array) -> Array:
        if self.page_by_page:
            return write_pages_one_by_one(pool, page, kv)
        return pool.at[page].set(to_pool(kv, pool.dtype))

    def copy_pages(self, pool: Array, source: Array, target: Array) -> Array:
        if self.page_by_page:
            return copy_pages_one_by_one(pool, source, target)
        return pool.at[target].set(pool[source])

    def begin_decode(self, pool: Array, page_table: Array, position: Array, num_layers: int) -> Cache:
        return pool, gather_context(pool, page_table, position, num_layers, self._read_parts)

    def end_decode(self, cache: Cache) -> Array:
        return cache[0]

    def write(self, cache: Cache, layer: Array, page: Array, position: Array, kv: Array) -> Cache:
        pool, context = cache
        at = (page, position % pool.shape[1])
        return pool.at[at].set(to_pool(kv, pool.dtype)), extend_context(context, layer, kv, position)

    def decode(
        self, q: Array, cache: Cache, layer: Array, page_table: Array, position: Array, active: Array,
        sinks: Array | None = None,
    ) -> Any:  # fmt: skip
        modifier = self.heads.modifier_of(layer)
        size = self.heads.kept.value_size
        return attend_context(q, cache[1], layer, position, modifier, sinks, partial=self.partial, value_size=size)

    def begin_prefill(self, start: Array, page_table: Array, used: Array) -> Rows:
        return start, page_table

    def prefill(
        self, q: Array, pool: Array, layer: Array, first_page: Array, rows: Rows, sinks: Array | None = None
    ) -> Any:
        start, page_table = rows
        modifier = self.heads.modifier_of(layer)
        pages = first_page + page_table
        return paged_attention(q, pool, pages, start, modifier, self._read_kv, sinks, partial=self.partial)
