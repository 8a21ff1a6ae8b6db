"""What the engine asks of attention over paged K/V, whatever the kind of device."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, Shaped

from lockstep.attention.softmax import Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads of one device.

    Args:
        kv_heads: key/value heads.
        group: query heads that share a key/value head.
        head_size: numbers in a head.
        scores: soft cap and window.
    """

    kv_heads: int
    group: int
    head_size: int
    scores: Scores = Scores()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredKvHeads:
    """Heads as the pool has them: a kernel may need more and wider ones than the model has, the rest zeros; in 8 bits
    each is wider by its scale.

    Args:
        kv_heads: key/value heads.
        head_size: numbers in a head.
    """

    kv_heads: int
    head_size: int


@runtime_checkable
class Attention(Protocol):
    """Attention over a flat pool ``[layer * pages + page, page_size, 2 * kv_heads, head]``.

    K of kv head ``h`` is at ``2 * h`` of the pool's heads, V at ``2 * h + 1``. ``cache`` is whatever a decode launch
    carries; only these functions look inside.
    """

    @property
    def stored(self) -> StoredKvHeads:
        """Heads of the pool."""

    def pack(self, kv: Float[Array, "... two_kv_heads head"]) -> Shaped[Array, "... stored_two_kv_heads stored_head"]:
        """K and V as the pool has them."""

    def write_pages(
        self,
        pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"],
        page: Int[Array, " row"],
        kv: Float[Array, "row page_size two_kv_heads head"],
    ) -> Shaped[Array, "pool_page page_size two_kv_heads stored_head"]:
        """Puts whole pages into the pool; of a page that several rows name, any."""

    def copy_pages(
        self,
        pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"],
        source: Int[Array, " row"],
        target: Int[Array, " row"],
    ) -> Shaped[Array, "pool_page page_size two_kv_heads stored_head"]:
        """Copies pages inside the pool; no target is the source of another row."""

    def begin_decode(
        self,
        pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"],
        page_table: Int[Array, "slot page"],
        position: Int[Array, " slot"],
        num_layers: int,
    ) -> Any:
        """The cache of a decode launch, made once."""

    def end_decode(self, cache: Any) -> Shaped[Array, "pool_page page_size two_kv_heads stored_head"]:
        """The pool with all that was written."""

    def write(
        self,
        cache: Any,
        layer: Int[Array, ""],
        page: Int[Array, " slot"],
        position: Int[Array, " slot"],
        kv: Float[Array, "slot two_kv_heads head"],
    ) -> Any:
        """Puts one position of each slot into the cache; ``page`` is of the pool."""

    def decode(
        self,
        q: Float[Array, "slot kv_head group head"],
        cache: Any,
        layer: Int[Array, ""],
        page_table: Int[Array, "slot page"],
        position: Int[Array, " slot"],
        active: Bool[Array, " slot"],
    ) -> Float[Array, "slot kv_head group head"]:
        """Attends one query per slot to the positions up to and including its own; ``page_table`` is of the pool."""

    def arrange(self, start: Int[Array, " row"], page_table: Int[Array, "row page"], used: Bool[Array, " row"]) -> Any:
        """What a prefill launch works out once, for all layers."""

    def prefill(
        self,
        q: Float[Array, "row query kv_head group head"],
        pool: Shaped[Array, "pool_page page_size two_kv_heads stored_head"],
        first_page: Int[Array, ""],
        rows: Any,
    ) -> Float[Array, "row query kv_head group head"]:
        """Attends each query to all positions of its sequence up to and including its own.

        Args:
            q: query ``i`` of a row stands at position ``start + i``.
            pool: with K/V of all rows.
            first_page: of the layer.
            rows: of `arrange`.
        """
