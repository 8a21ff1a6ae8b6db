"""Which rows the batch of a step has, where rows are in buckets of one length each: a pure function of the step."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from lockstep.training.data.order import RowOrder


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketOrder:
    """The order of the batches of a run.

    All rows of a batch are of one bucket. The buckets take turns in the ratio of their rows, so each has its epochs
    about when the others have. Within a bucket the order is a `RowOrder`: sources by weight, and each of them in an
    order of its own in every epoch.

    Args:
        sizes: The number of rows of each bucket of each source, ``sizes[source][bucket]``; in a source, the rows of a
            bucket come one after the other, those of the first bucket first.
        weights: The weight of each source in the mixture.
        seed: The seed of the order.
        shuffle: Whether each epoch has an order of its own; otherwise all have the order of the files.
    """

    sizes: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    seed: int
    shuffle: bool

    @functools.cached_property
    def buckets(self) -> tuple[int, ...]:
        """The numbers of the buckets that have rows."""
        return tuple(int(bucket) for bucket in np.flatnonzero(np.sum(self.sizes, axis=0)))

    def rows(self, step: int, batch_size: int, rows: slice) -> list[tuple[int, int]]:
        """Return the source and the number there of some rows of a batch.

        Args:
            step: The 0-based step.
            batch_size: The number of rows of the whole batch.
            rows: Which rows of the batch.
        """
        turn, n_before = self._turns.turn(step)
        bucket, (sources, order) = self.buckets[turn], self._in_bucket[turn]
        places = range(n_before * batch_size, (n_before + 1) * batch_size)[rows]
        return [(sources[one], sum(self.sizes[sources[one]][:bucket]) + row) for one, row in order.rows(places)]

    def first(self, count: int) -> list[Sequence[object]]:
        """Return the beginning of the order, by which another order is told from this one.

        Args:
            count: The number of places of each bucket, and of steps.
        """
        found: list[Sequence[object]] = [order.rows(range(count)) for _, order in self._in_bucket]
        return found if len(found) == 1 else [*found, [self._turns.turn(step) for step in range(count)]]

    @functools.cached_property
    def _turns(self) -> RowOrder:
        """The order of the buckets: a place is a step."""
        shares = [sum(self._share(source, bucket) for source in range(len(self.sizes))) for bucket in self.buckets]
        ones = (1,) * len(shares)
        return RowOrder(sizes=ones, weights=tuple(shares), seed=self.seed, shuffle=False)

    @functools.cached_property
    def _in_bucket(self) -> tuple[tuple[tuple[int, ...], RowOrder], ...]:
        """The sources that have rows for each bucket, and the order of these rows; empty buckets are left out."""
        found = []
        for bucket in self.buckets:
            sources = tuple(source for source, sizes in enumerate(self.sizes) if sizes[bucket])
            sizes = tuple(self.sizes[source][bucket] for source in sources)
            weights = tuple(self._share(source, bucket) for source in sources)
            # A seed of its own: buckets of one size would otherwise have the same order.
            seed = self.seed + (bucket << 32)
            found.append((sources, RowOrder(sizes=sizes, weights=weights, seed=seed, shuffle=self.shuffle)))
        return tuple(found)

    def _share(self, source: int, bucket: int) -> float:
        """The share of a bucket's rows of a source in the mixture."""
        return self.weights[source] * (self.sizes[source][bucket] / sum(self.sizes[source]))
