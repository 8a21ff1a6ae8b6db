"""Which row of which source has which place in a run: a pure function, without a list of all rows."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

SMALL = 1 << 16
"""Rows up to which an epoch's order is a list; beyond, each place is computed alone. Grain's shuffle permutes 2**16
numbers or more and skips those that are too large: 11 ms for a place among 3 rows, microseconds among millions."""

ENDLESS = 1 << 62

ORDER_VERSION = 2
"""Grows with every change of the order that a seed gives; it is in the digest of the data, so that no run goes on from
a checkpoint of another order."""

ROUNDS = 16
"""Rounds of the block cipher (Simon; Beaulieu et al. 2013) that computes a place. Rows at neighbouring places are
correlated with 4 rounds up to 0.4, with 8 still up to 0.03 (1,000,000 rows); from 10 on nothing was found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The order of the rows of a run.

    Every row of a source comes once per epoch of that source. In a mixture each source has epochs of its own, and the
    sources take turns in the ratio of their weights.

    Args:
        sizes: The number of rows of each source.
        weights: The weight of each source in the mixture.
        seed: The seed of the order.
        shuffle: Whether each epoch has an order of its own; otherwise all have the order of the files.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    shuffle: bool

    def rows(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the source and the number of the row there of each place.

        Args:
            places: Places in the run, from 0: ``step * batch_size`` and on for the batch of a step.
        """
        found = []
        for place in places:
            source, count = self.turn(place)
            epoch, offset = divmod(count, self.sizes[source])
            found.append((source, self._shuffled(source, epoch, offset) if self.shuffle else offset))
        return found

    def turn(self, place: int) -> tuple[int, int]:
        """Return the source of a place, and how many places before it are that source's.

        Args:
            place: A place in the run, from 0.
        """
        return (0, place) if len(self.sizes) == 1 else self._mixture[place]

    @functools.cached_property
    def _mixture(self) -> Any:
        from grain import MapDataset

        # Each source is its own endless counter; grain says whose turn it is at a place.
        counters = [MapDataset.range(ENDLESS).map(functools.partial(_of_source, n)) for n in range(len(self.sizes))]
        return MapDataset.mix(counters, list(self.weights))

    def _shuffled(self, source: int, epoch: int, offset: int) -> int:
        size, seed = self.sizes[source], _seed(self.seed, source, epoch)
        if size <= SMALL:
            return int(_permutation(size, seed)[offset])
        from grain.experimental import index_shuffle  # half a second to import, which small data need not wait for

        # Grain 0.2.18 loses a number where the largest is a power of two (2**16 and 2**18, tried), so there it shuffles
        # one more, and what is mapped to that one is mapped again.
        largest = size if (size - 1).bit_count() == 1 else size - 1
        row = index_shuffle(offset, max_index=largest, seed=seed, rounds=ROUNDS)
        while row >= size:
            row = index_shuffle(row, max_index=largest, seed=seed, rounds=ROUNDS)
        return int(row)


def _of_source(source: int, count: int) -> tuple[int, int]:
    return source, count


@functools.lru_cache(maxsize=16)
def _permutation(size: int, seed: int) -> Int[np.ndarray, " row"]:
    return np.random.default_rng(seed).permutation(size)


@functools.lru_cache(maxsize=1024)
def _seed(seed: int, source: int, epoch: int) -> int:
    """A seed of 32 bits that neighbouring epochs of neighbouring seeds do not share."""
    return int.from_bytes(hashlib.sha256(f"{seed} {source} {epoch}".encode()).digest()[:4], "little")
