"""Which row of which source has which place in a run: a pure function, without a list of all rows."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

BLOCK = 4096
"""The places over which a mixture keeps its weights exactly, to 1 in this number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The order of the rows of a run.

    Every row of a source comes once per epoch of that source. In a mixture each source has epochs of its own; in every
    block of `BLOCK` places each has its share, at places that are drawn anew for each block.

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

    @functools.cached_property
    def shares(self) -> tuple[int, ...]:
        """The places of each source in a block: the largest remainders are rounded up, so that they sum to `BLOCK`."""
        exact = np.asarray(self.weights) / sum(self.weights) * BLOCK
        shares = np.floor(exact).astype(int)
        shares[np.argsort(shares - exact, kind="stable")[: BLOCK - shares.sum()]] += 1
        return tuple(int(share) for share in shares)

    def rows(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the source and the number of the row there of each place.

        Args:
            places: Places in the run, from 0: ``step * batch_size`` and on for the batch of a step.
        """
        found = []
        for place in places:
            source, count = self._source(place)
            epoch, offset = divmod(count, self.sizes[source])
            found.append((source, self._shuffled(source, epoch, offset) if self.shuffle else offset))
        return found

    def _source(self, place: int) -> tuple[int, int]:
        """The source of a place, and how many places before it are that source's."""
        if len(self.sizes) == 1:
            return 0, place
        block, offset = divmod(place, BLOCK)
        sources, ranks = _block(self.shares, self.seed, block if self.shuffle else 0)
        source = int(sources[offset])
        return source, block * self.shares[source] + int(ranks[offset])

    def _shuffled(self, source: int, epoch: int, offset: int) -> int:
        from grain.experimental import index_shuffle  # a second to import, which most commands need not wait for

        size = self.sizes[source]
        return int(index_shuffle(offset, max_index=size - 1, seed=_seed(self.seed, source, epoch), rounds=4))


@functools.lru_cache(maxsize=8)
def _block(
    shares: tuple[int, ...], seed: int, block: int
) -> tuple[Int[np.ndarray, " place"], Int[np.ndarray, " place"]]:
    """The source of each place of a block, and its number among the places of that source."""
    sources = np.random.default_rng((seed, block)).permutation(np.repeat(np.arange(len(shares)), shares))
    ranks = np.empty_like(sources)
    for source, share in enumerate(shares):
        ranks[sources == source] = np.arange(share)
    return sources, ranks


@functools.lru_cache(maxsize=1024)
def _seed(seed: int, source: int, epoch: int) -> int:
    """A seed of 32 bits that neighbouring epochs of neighbouring seeds do not share."""
    return int.from_bytes(hashlib.sha256(f"{seed} {source} {epoch}".encode()).digest()[:4], "little")
