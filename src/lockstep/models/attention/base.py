"""The protocol between the decoder and attention over a paged KV cache, the same for every kind of device."""

import dataclasses
from typing import Any, Final, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from lockstep.models.attention.kv import PagedKv
from lockstep.models.attention.softmax import ScoreModifier

NO_WINDOW: Final = 2**30
"""More positions than any sequence has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention heads that one device computes.

    Args:
        group: The number of query heads that share a key/value head (Ainslie et al. 2023, grouped-query attention,
            https://arxiv.org/abs/2305.13245).
        windows: The sliding window of each layer, None for none, where layers differ; ``modifier`` then has no window.
        sinks: Whether each head has a score for nothing (`lockstep.models.attention.softmax.attend`).
        value_size: The first elements of K that are V too; None where V has rows of its own (`PagedKv`).
        by_layer: Those of each layer, where layers differ in more than their windows.
        context: The number of devices that have the same key/value heads, over which positions are split.
        context_axes: The mesh axes of those devices.
    """

    kv_heads: int
    group: int
    head_size: int
    modifier: ScoreModifier = ScoreModifier()
    windows: tuple[int | None, ...] | None = None
    sinks: bool = False
    value_size: int | None = None
    by_layer: "tuple[Heads, ...] | None" = None
    context: int = 1
    context_axes: tuple[str, ...] = ()

    @property
    def kept(self) -> PagedKv:
        """The rows that a layer keeps of a position."""
        return PagedKv(kv_heads=self.kv_heads, head_size=self.head_size, value_size=self.value_size)

    @property
    def at_own_positions(self) -> "Heads":
        """The heads that a device computes at those positions that it has: all query heads of its key/value heads."""
        if self.context == 1:
            return self
        own = dataclasses.replace(self.modifier, window=self._share(self.modifier.window))
        windows = None if self.windows is None else tuple(map(self._share, self.windows))
        group = self.group * self.context
        return dataclasses.replace(
            self, group=group, modifier=own, windows=windows, sinks=False, context=1, context_axes=()
        )

    def _share(self, window: Any) -> Any:
        return None if window is None else window // self.context

    def modifier_of(self, layer: Int[Array, ""]) -> ScoreModifier:
        """Return the soft cap and the sliding window of a layer."""
        if self.windows is None:
            return self.modifier
        windows = jnp.asarray([NO_WINDOW if window is None else window for window in self.windows], jnp.int32)
        return dataclasses.replace(self.modifier, window=windows[layer])


@runtime_checkable
class Attention(Protocol):
    """Attention over a flat pool ``[layer * pages + page, page_size, *stored_kv_heads.shape]``.

    All methods are traced, on
    one device's blocks. ``cache`` is what a decode launch carries from step to step; only these methods look inside.
    """

    @property
    def stored_kv_heads(self) -> PagedKv:
        """The rows that the pool keeps of a position."""

    def pack(self, kv: Float[Array, "... two_kv_heads head"]) -> Float[Array, "... stored_two_kv_heads stored_head"]:
        """Pad K and V to the heads that the pool stores; writing rounds them to the dtype of the pool."""

    def write_pages(
        self,
        pool: Num[Array, "pool_page page_size two_kv_heads stored_head"],
        page: Int[Array, " row"],
        kv: Float[Array, "row page_size two_kv_heads head"],
    ) -> Num[Array, "pool_page page_size two_kv_heads stored_head"]:
        """Write whole pages into the pool; where several rows name the same page, any one of them wins."""

    def copy_pages(
        self,
        pool: Num[Array, "pool_page page_size two_kv_heads stored_head"],
        source: Int[Array, " row"],
        target: Int[Array, " row"],
    ) -> Num[Array, "pool_page page_size two_kv_heads stored_head"]:
        """Copy pages inside the pool; no row's target may be another row's source."""

    def begin_decode(
        self,
        pool: Num[Array, "pool_page page_size two_kv_heads stored_head"],
        page_table: Int[Array, "slot page"],
        position: Int[Array, " slot"],
        num_layers: int,
    ) -> Any:
        """Make the cache of a decode launch, once before its first step."""

    def end_decode(self, cache: Any) -> Num[Array, "pool_page page_size two_kv_heads stored_head"]:
        """Return the pool with everything that was written during the launch."""

    def write(
        self,
        cache: Any,
        layer: Int[Array, ""],
        page: Int[Array, "slot query"],
        position: Int[Array, "slot query"],
        kv: Float[Array, "slot query two_kv_heads head"],
    ) -> Any:
        """Write K and V of one or more positions per slot into the cache; ``page`` indexes the flat pool.

        A position whose page is a layer's null page may lie beyond the page table.
        """

    def decode(
        self,
        q: Float[Array, "slot query kv_head group head"],
        cache: Any,
        layer: Int[Array, ""],
        page_table: Int[Array, "slot page"],
        position: Int[Array, " slot"],
        active: Bool[Array, " slot"],
        sinks: Float[Array, "kv_head group"] | None = None,
    ) -> Float[Array, "slot query kv_head group head"]:
        """Attend one or more queries per slot, each to the positions up to and including its own.

        Args:
            q: The queries of one layer; query ``i`` of a slot is at ``position + i``.
            cache: The cache, with K and V of the queries' own positions already written.
            page_table: The pages of each slot, in order, as indices of the flat pool.
            position: The position of each slot's first query.
            active: Whether the slot has a sequence; the output of other slots is never read, nor is that of queries
                beyond the page table.
            sinks: The score of each head for nothing, where ``Heads.sinks`` says that there is one.
        """

    def begin_prefill(
        self, start: Int[Array, " row"], page_table: Int[Array, "row page"], used: Bool[Array, " row"]
    ) -> Any:
        """Compute what all layers of a prefill launch share, once: the ``rows`` of `prefill`.

        Args:
            start: The position of each row's first query.
            page_table: The pages of each row's sequence, numbered from the first page of a layer.
            used: Whether the row is part of a prompt; the output of other rows is never read.
        """

    def prefill(
        self,
        q: Float[Array, "row query kv_head group head"],
        pool: Num[Array, "pool_page page_size two_kv_heads stored_head"],
        layer: Int[Array, ""],
        first_page: Int[Array, ""],
        rows: Any,
        sinks: Float[Array, "kv_head group"] | None = None,
    ) -> Float[Array, "row query kv_head group head"]:
        """Attend each query to all positions of its sequence up to and including its own.

        Args:
            q: The queries; query ``i`` of a row is at position ``start + i``.
            pool: The pool, with K and V of all rows already written.
            first_page: The index in the flat pool of the layer's page 0.
            sinks: The score of each head for nothing, as for `decode`.
        """


@runtime_checkable
class Kernel(Protocol):
    """A class of `Attention` that reads K and V in place, from the pages of the pool, and what it declares."""

    @classmethod
    def platform(cls) -> str:
        """The platform of its devices, running ones and those that can only be compiled for."""

    @classmethod
    def refusal(cls, heads: Heads) -> str | None:
        """Why it does not take the heads, as the rest of a sentence about it; None where it does."""

    @classmethod
    def kept(cls, heads: Heads, dtype: jnp.dtype) -> PagedKv:
        """The rows that a pool of a dtype keeps for it."""

    @classmethod
    def max_page_table_rows(cls, pages: int) -> int | None:
        """The most rows that the page table of a launch may have; None for any number."""

    @classmethod
    def make(
        cls, device_kind: str, heads: Heads, *, page_size: int, dtype: jnp.dtype, kv_dtype: jnp.dtype
    ) -> Attention:
        """The attention for the heads of a device.

        Raises:
            ConfigError: It cannot take the heads in this dtype.
        """
