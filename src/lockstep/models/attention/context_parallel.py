"""Attention of devices that have the same key/value heads and share the positions: context parallelism in decode.

With more devices than key/value heads each head would be on several devices, with all of its K and V on each. Here
each of them has every n-th position instead (``n`` devices, one position after the other), so that a pool holds n times
as many tokens and a step reads an n-th of each context. All query heads of the head are gathered, each device attends
to the positions that it has, and the results are sent to the devices whose heads they are, which join them by the sums
of their softmax (Bhatia et al. 2025, Helix Parallelism, https://arxiv.org/abs/2507.07120, section 2.1).

A device counts its own positions: ``ceil((p - device) / n)`` of them come before position ``p``. A page has an n-th of
its positions, a sliding window an n-th of its width; and of the queries of a prompt each n-th is one position further
by that count than the one before, so that attention computes n groups of them, one after the other.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lockstep.errors import ConfigError
from lockstep.models.attention.base import Attention, Heads
from lockstep.models.attention.kv import PagedKv


def check_context(layout: str, context: int, copies: int, page_size: int, windows: Iterable[Any]) -> None:
    """Refuse a number of devices that cannot split the positions of a kv head.

    Args:
        layout: As the user wrote it.
        copies: The number of devices that have the same kv head.

    Raises:
        ConfigError: Another number of them, or a page or sliding window, cannot be divided.
    """
    if copies % context:
        raise ConfigError(
            f"layout {layout} splits the positions of a kv head over {context} devices, and each kv head is on "
            f"{copies}. Set context to a divisor of that, or leave it out."
        )
    for name, size in (("page_size", page_size), *(("a sliding window", window or 0) for window in windows)):
        if size % context:
            raise ConfigError(
                f"layout {layout} splits {name} = {size}, which {context} does not divide. Set context to a divisor of "
                "it, or leave it out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextParallelAttention:
    """`Attention` with the positions of each sequence split over devices.

    Args:
        heads: The heads of a device; its query heads are those that it has weights of.
        own: Attention to the positions of a device, by their count there; returns `Partial`.
    """

    heads: Heads
    own: Attention

    @property
    def stored_kv_heads(self) -> PagedKv:
        return self.own.stored_kv_heads

    @property
    def _devices(self) -> int:
        return self.heads.context

    @property
    def _device(self) -> Array:
        return jax.lax.axis_index(self.heads.context_axes)

    def _before(self, position: Array) -> Array:
        """The number of positions before one that this device has."""
        return (position + self._devices - 1 - self._device) // self._devices

    def pack(self, kv: Array) -> Array:
        return self.own.pack(kv)

    def write_pages(self, pool: Array, page: Array, kv: Array) -> Array:
        by_device = kv.reshape(kv.shape[0], -1, self._devices, *kv.shape[2:])
        return self.own.write_pages(pool, page, jax.lax.dynamic_index_in_dim(by_device, self._device, 2, False))

    def copy_pages(self, pool: Array, source: Array, target: Array) -> Array:
        return self.own.copy_pages(pool, source, target)

    def begin_decode(self, pool: Array, page_table: Array, position: Array, num_layers: int) -> Any:
        return self.own.begin_decode(pool, page_table, self._before(position), num_layers)

    def end_decode(self, cache: Any) -> Array:
        return self.own.end_decode(cache)

    def write(self, cache: Any, layer: Array, page: Array, position: Array, kv: Array) -> Any:
        """Write a position where it is the device's; else to the null page and where its next position will be."""
        is_own = position % self._devices == self._device
        return self.own.write(cache, layer, jnp.where(is_own, page, 0), self._before(position), kv)

    def decode(
        self, q: Array, cache: Any, layer: Array, page_table: Array, position: Array, active: Array,
        sinks: Array | None = None,
    ) -> Array:  # fmt: skip

        def attend(first: int, q: Array) -> Any:
            return self.own.decode(q, cache, layer, page_table, self._before(position + first + 1) - 1, active)

        return self._attend_groups(attend, q, position, sinks)

    def begin_prefill(self, start: Array, page_table: Array, used: Array) -> Any:
        """Compute what each group of queries needs, and the start of each row."""
        groups = [
            self.own.begin_prefill(self._before(start + first + 1) - 1, page_table, used)
            for first in range(self._devices)
        ]
        return start, groups

    def prefill(
        self, q: Array, pool: Array, layer: Array, first_page: Array, rows: Any, sinks: Array | None = None
    ) -> Array:
        start, groups = rows

        def attend(first: int, q: Array) -> Any:
            return self.own.prefill(q, pool, layer, first_page, groups[first])

        return self._attend_groups(attend, q, start, sinks)

    def _attend_groups(self, attend: Any, q: Array, start: Array, sinks: Array | None) -> Array:
        """Attend every n-th query together; ``q`` is ``[row, query, kv_head, group, head]``, from ``start`` on."""
        queries = q.shape[1]
        groups = min(self._devices, queries)
        padded = jnp.pad(q, ((0, 0), (0, -queries % groups), *((0, 0) for _ in q.shape[2:])))
        gathered = jax.lax.all_gather(padded, self.heads.context_axes, axis=q.ndim - 2, tiled=True)
        partial = [attend(first, gathered[:, first::groups]) for first in range(groups)]
        whole = jax.tree.map(
            lambda *a: jnp.stack(a, axis=2).reshape(len(q), -1, *a[0].shape[2:])[:, :queries], *partial
        )
        visible = self._before(start[:, None] + jnp.arange(queries) + 1)
        return self._join(whole, visible > 0, sinks, q.dtype)

    def _join(self, partial: Any, sees: Array, sinks: Array | None, dtype: jnp.dtype) -> Array:
        """Join what all devices found for the heads of this one.

        Args:
            found: The `Partial` of this device.
            sees: Whether a query sees any position of this device ``[*batch]``.
        """
        sees = sees[..., None, None]
        lse = jnp.where(sees, partial.lse, -jnp.inf)
        joined = jnp.concatenate([jnp.where(sees[..., None], partial.out, 0), lse[..., None]], axis=-1)
        by_device = joined.reshape(*lse.shape[:-1], self._devices, self.heads.group, -1)
        axis = by_device.ndim - 3
        parts = jax.lax.all_to_all(by_device, self.heads.context_axes, split_axis=axis, concat_axis=axis)
        out, lse = parts[..., :-1], parts[..., -1]
        largest = lse.max(axis=axis)
        if sinks is not None:
            largest = jnp.maximum(largest, sinks.astype(jnp.float32))
        weights = jnp.exp(lse - jnp.expand_dims(largest, axis))
        total = weights.sum(axis=axis)
        if sinks is not None:
            total += jnp.exp(sinks.astype(jnp.float32) - largest)
        return ((weights[..., None] * out).sum(axis=axis) / total[..., None]).astype(dtype)
