"""The rows of a run, from caches: each host reads those of its own devices, when they are needed."""

import hashlib
from collections.abc import Sequence

import numpy as np

from lockstep.training.data.bucket_order import BucketOrder
from lockstep.training.data.order import ORDER_VERSION
from lockstep.training.data.token_cache import TokenCache

_DIGESTED = 64
"""Places of the order that are in the digest: with another version of grain they might be others."""


class CachedRows:
    """The batches of a run (`lockstep.training.data.rows.Batches`): a pure function of the step.

    Args:
        caches: The cache of each source, none of them empty.
        weights: The weight of each source in the mixture.
        seed: The seed of the order.
        shuffle: Whether each epoch has an order of its own; otherwise all have the order of the files.
    """

    def __init__(self, caches: Sequence[TokenCache], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self.caches = tuple(caches)
        sizes = tuple(cache.metadata.bucket_rows for cache in caches)
        self.order = BucketOrder(sizes=sizes, weights=tuple(weights), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Return the number of rows of all sources."""
        return sum(len(cache) for cache in self.caches)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of a row, ascending: one, or one for each bucket that has rows."""
        return tuple(self.caches[0].metadata.lengths[bucket] for bucket in self.order.buckets)

    def batch(self, step: int, batch_size: int, rows: slice) -> dict[str, np.ndarray]:
        """Return some rows of the batch of a step, see `lockstep.training.data.rows.Batches.batch`."""
        drawn = self.order.rows(step, batch_size, rows)
        columns: dict[str, np.ndarray] = {}
        for source in sorted({source for source, _ in drawn}):
            mine = [place for place, (one, _) in enumerate(drawn) if one == source]
            for name, values in self.caches[source].take([drawn[place][1] for place in mine]).items():
                if name not in columns:
                    columns[name] = np.empty((len(drawn), *values.shape[1:]), values.dtype)
                columns[name][mine] = values
        return columns

    def digest(self) -> str:
        """Return the SHA-256 of all rows and of their order, and the version of the order, for hosts to agree on."""
        order = self.order
        parts = [cache.digest() for cache in self.caches], order.weights, order.seed, order.shuffle
        rows = hashlib.sha256(repr((*parts, *order.first(_DIGESTED))).encode()).hexdigest()
        return f"{rows} (version {ORDER_VERSION} of the order)"
