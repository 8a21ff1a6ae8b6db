"""Attention on TPU: jax's ragged paged attention kernel, which reads K and V in place from the pages of the pool.

Ragged paged attention: ``jax.experimental.pallas.ops.tpu.ragged_paged_attention`` (Apache 2.0). Its contract, as far as
it is used here:

- The query tokens of all sequences are concatenated. Those of sequence ``i`` are ``q_starts[i] .. q_starts[i + 1]``,
  and are the *last* of its ``lengths[i]`` positions.
- Page ``j`` of a sequence's page table holds the positions from ``j * page_size`` on. K of kv head ``h`` is at index
  ``2 * h`` of a page's head axis, V at ``2 * h + 1``.
- Sequences from ``num_sequences`` on are not read, and the output of query tokens that belong to none is undefined.
- Each sequence has at least 1 position: a length of 0 would start a copy that is never waited for.
- Whole blocks of pages are fetched, once for each block of query tokens.
- With scales for K and V, numbers of another dtype are converted to that of the queries after they were fetched.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lockstep.errors import ConfigError
from lockstep.models.attention.base import Heads
from lockstep.models.attention.kv import PagedKv
from lockstep.models.attention.page_ops import copy_pages_one_by_one
from lockstep.models.attention.tpu_blocks import (
    LANES,
    BlockKey,
    Blocks,
    Rows,
    blocks_for,
    max_table_rows,
    stored_head_size,
    stored_heads,
    takes,
    tpu_generation,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuAttention:
    """`Attention` by the kernel. It has no sinks: they are joined with what it returns by the sums of its softmax.

    Args:
        decode_blocks: The block sizes for one query token per sequence.
        prefill_blocks: The block sizes for many query tokens per sequence.
        partial: Whether there are more positions on other devices; it returns `Partial` then.
    """

    heads: Heads
    stored_kv_heads: PagedKv
    page_size: int
    decode_blocks: Blocks
    prefill_blocks: Blocks
    partial: bool = False

    @classmethod
    def platform(cls) -> str:
        return "tpu"

    @classmethod
    def refusal(cls, heads: Heads) -> str | None:
        """Why the kernel does not take the heads: it steps through rows of `LANES` elements, and does not compile for
        wider heads on any generation.
        """
        if heads.by_layer is not None:
            sizes = sorted({own.head_size for own in heads.by_layer})
            return f"takes heads of one shape, and layers here have heads of {' and '.join(map(str, sizes))} numbers"
        if heads.value_size is not None:
            return f"takes K and V, and here is a latent of both, of {heads.head_size} numbers"
        if heads.head_size > LANES:
            return f"takes heads of at most {LANES} numbers, and here are {heads.head_size}"
        return None

    @classmethod
    def kept(cls, heads: Heads, dtype: jnp.dtype) -> PagedKv:
        return PagedKv(
            kv_heads=stored_heads(heads.kv_heads, jnp.dtype(dtype).itemsize),
            head_size=stored_head_size(heads.head_size),
        )

    @classmethod
    def max_page_table_rows(cls, pages: int) -> int:
        return max_table_rows(pages)

    @classmethod
    def make(
        cls, device_kind: str, heads: Heads, *, page_size: int, dtype: jnp.dtype, kv_dtype: jnp.dtype
    ) -> "TpuAttention":
        pool = cls.kept(heads, kv_dtype)
        key = BlockKey(
            generation=tpu_generation(device_kind),
            q_heads=pool.kv_heads * heads.group,
            kv_heads=pool.kv_heads,
            head_size=pool.head_size,
            page_size=page_size,
            dtype=jnp.dtype(dtype).name,
            kv_dtype=kv_dtype.name,
        )
        if not takes(key.q_heads, key.kv_heads, kv_dtype.itemsize):
            raise ConfigError(
                f"the TPU attention kernel cannot take {key.q_heads} query heads and {key.kv_heads} kv heads per "
                f"device in {key.dtype}: in {8 * jnp.dtype(dtype).itemsize} bits, 4 kv heads must serve a multiple of "
                "8 query heads. Set dtype to bfloat16, or layout to {tensor: N} with an N that leaves at most 4 kv "
                "heads to a device."
            )
        decode, prefill = blocks_for(key)
        return cls(heads=heads, stored_kv_heads=pool, page_size=page_size, decode_blocks=decode, prefill_blocks=prefill)

    def pack(self, kv: Array) -> Array:
        rows, size = self.stored_kv_heads.shape
        return _pad(kv, -2, rows, -1, size)

    def write_pages(self, pool: Array, page: Array, kv: Array) -> Array:
        return _write(pool, page, self.pack(kv))

    def copy_pages(self, pool: Array, source: Array, target: Array) -> Array:
        return copy_pages_one_by_one(pool, source, target)

    def begin_decode(self, pool: Array, page_table: Array, position: Array, num_layers: int) -> Array:
        return pool  # there is no second copy of K and V

    def end_decode(self, cache: Array) -> Array:
        return cache

    def write(self, cache: Array, layer: Array, page: Array, position: Array, kv: Array) -> Array:
        """Write to the pages of the pool with one call of the kernel that copies, whose entries are positions."""
        entries = cache.reshape(-1, *cache.shape[2:])
        at = (page * self.page_size + position % self.page_size).reshape(-1)
        return _write(entries, at, self.pack(kv.reshape(-1, *kv.shape[2:]))).reshape(cache.shape)

    def decode(
        self, q: Array, cache: Array, layer: Array, page_table: Array, position: Array, active: Array,
        sinks: Array | None = None,
    ) -> Any:  # fmt: skip
        """Attend the query tokens of all slots in one call of the kernel, each slot a sequence.

        It reads the first position of the table of an idle slot.
        """
        slots, queries = q.shape[:2]
        # The last queries may lie beyond the table, whose rows therefore go on with pages that no other query sees.
        beyond = -(-(queries - 1) // self.page_size)
        rows = Rows(
            lengths=jnp.maximum(jnp.where(active, position, 0) + queries, 1),
            page_table=jnp.pad(page_table, ((0, 0), (0, beyond))),
            q_starts=jnp.arange(slots + 1, dtype=jnp.int32) * queries,
            num_sequences=jnp.full((1,), slots, jnp.int32),
        )
        tokens = q.reshape(-1, *q.shape[2:])
        blocks = self.decode_blocks if queries == 1 else self.prefill_blocks
        attended = self._attend(tokens, cache, layer, rows, 0, blocks, sinks)
        return jax.tree.map(lambda a: a.reshape(slots, queries, *a.shape[1:]), attended)

    def begin_prefill(self, start: Array, page_table: Array, used: Array) -> Rows:
        """Join consecutive rows of a prompt to one sequence, so that its pages are read once per query block."""
        rows, size = start.shape[0], self.page_size
        index = jnp.arange(rows)
        used = used | (index == 0)  # the kernel needs a sequence; of an unused row it is the null page
        same = jnp.all(page_table == jnp.roll(page_table, 1, axis=0), axis=1)
        follows = same & (start == jnp.roll(start, 1) + size) & (index > 0)
        sequence = jnp.where(used, jnp.cumsum(used & ~follows) - 1, rows)
        total = jnp.sum(used, dtype=jnp.int32)
        first = jnp.full((rows,), total, jnp.int32).at[sequence].min(index.astype(jnp.int32), mode="drop")
        lengths = jnp.ones((rows,), jnp.int32).at[sequence].max(start + size, mode="drop")
        return Rows(
            lengths=lengths,
            page_table=page_table[jnp.minimum(first, rows - 1)],
            q_starts=jnp.append(first, total) * size,
            num_sequences=jnp.sum(used & ~follows, dtype=jnp.int32)[None],
        )

    def prefill(
        self, q: Array, pool: Array, layer: Array, first_page: Array, rows: Rows, sinks: Array | None = None
    ) -> Any:
        """Attend all rows in one call of the kernel; the output of unused rows is zeros."""
        tokens = q.reshape(-1, *q.shape[2:])
        attended = self._attend(tokens, pool, layer, rows, first_page, self.prefill_blocks, sinks)
        used = jnp.arange(tokens.shape[0]) < rows.q_starts[-1]

        def by_row(a: Array) -> Array:
            return jnp.where(used.reshape(-1, *(1 for _ in a.shape[1:])), a, 0).reshape(*q.shape[:2], *a.shape[1:])

        return jax.tree.map(by_row, attended)

    def _attend(
        self, q: Array, pool: Array, layer: Array, rows: Rows, first_page: Array | int, blocks: Blocks,
        sinks: Array | None,
    ) -> Any:  # fmt: skip
        """Call the kernel; ``q`` and the result are ``[token, kv_head, group, head]``."""
        if self.heads.windows is None:
            return self._kernel(self.heads.modifier.window, blocks, q, pool, rows, first_page, sinks)
        # The window is a constant of the kernel.
        windows = tuple(dict.fromkeys(self.heads.windows))
        branch = jnp.asarray([windows.index(window) for window in self.heads.windows], jnp.int32)
        branches = [functools.partial(self._kernel, window, blocks) for window in windows]
        return jax.lax.switch(branch[layer], branches, q, pool, rows, first_page, sinks)

    def _kernel(
        self, window: Any, blocks: Blocks, q: Array, pool: Array, rows: Rows, first_page: Array | int,
        sinks: Array | None,
    ) -> Any:  # fmt: skip
        # Imported here because they load the TPU kernel language, which other devices never need.
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        from lockstep.models.attention.tpu_kernels import partial_attention

        tokens, kv_heads, group, head = q.shape
        scale = None if pool.dtype == q.dtype else 1.0
        padded = _pad(q, 1, self.stored_kv_heads.kv_heads, 3, self.stored_kv_heads.head_size)
        padded = padded.reshape(tokens, -1, self.stored_kv_heads.head_size)
        options: dict[str, Any] = {
            "sm_scale": head**-0.5,
            "sliding_window": window,
            "soft_cap": self.heads.modifier.soft_cap,
            "k_scale": scale,
            "v_scale": scale,
            "num_kv_pages_per_block": min(blocks.pages, rows.page_table.shape[1]),
            "num_queries_per_block": min(blocks.queries, tokens),
            "vmem_limit_bytes": blocks.vmem_limit,
        }
        rows = rows._replace(page_table=first_page + rows.page_table)
        if sinks is None and not self.partial:
            attended = ragged_paged_attention(padded, pool, *rows, **options)
        else:
            attended = partial_attention(padded, pool, rows, **options)
        by_head = jax.tree.map(lambda a: a.reshape(tokens, -1, group, *a.shape[2:])[:, :kv_heads], attended)
        if self.partial:
            return by_head._replace(out=by_head.out[..., :head])
        if sinks is None:
            return by_head[..., :head]
        share = jax.nn.sigmoid(by_head.lse - sinks.astype(jnp.float32))  # of the positions, beside the sink's
        return (by_head.out[..., :head] * share[..., None]).astype(q.dtype)


def _write(pool: Array, index: Array, kv: Array) -> Array:
    # Imported here because it loads the TPU kernel language, which other devices never need.
    from lockstep.models.attention.tpu_kernels import write_entries

    return write_entries(pool, index, kv)


def _pad(array: Array, first: int, first_size: int, second: int, second_size: int) -> Array:
    """Pad two axes with zeros at their ends to the given sizes."""
    padding = [(0, 0)] * array.ndim
    padding[first] = (0, first_size - array.shape[first])
    padding[second] = (0, second_size - array.shape[second])
    return jnp.pad(array, padding) if any(after for _, after in padding) else array
