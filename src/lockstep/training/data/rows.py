"""The rows of a run and their order, in memory or from caches: a pure function of the step."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from lockstep.errors import ConfigError
from lockstep.training.data.examples import Example
from lockstep.training.data.token_cache import TokenCache


class Batches(Protocol):
    """The batches of a run: a pure function of the step, so that every host draws the same order."""

    def batch(self, step: int, batch_size: int, rows: slice) -> Mapping[str, np.ndarray]:
        """Return some rows of the batch of a step.

        Args:
            step: The 0-based optimizer step.
            rows: The rows of the batch that this host needs.

        Returns:
            Arrays by name, with the row as axis 0.
        """
        ...


@runtime_checkable
class BatchesOfLengths(Protocol):
    """`Batches` whose rows are longer in one step than in another."""

    @property
    def lengths(self) -> Sequence[int]:
        """All lengths of the last axis of the columns with the most axes, which are those with positions, ascending;
        the train step is compiled for each of them.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedRows:
    """A data set in host memory: arrays of equal length, drawn epoch by epoch.

    Args:
        columns: Arrays by name, with the row as axis 0.
        shuffle: Whether each epoch has an order of its own; otherwise all have the order of the files.

    Raises:
        ConfigError: There are no rows.

    Example:
        >>> import numpy as np
        >>> rows = lockstep.training.TokenizedRows(columns={"tokens": np.ones((16, 8), np.int32)}, seed=0)
        >>> rows.batch(step=0, batch_size=8, rows=slice(0, 2))["tokens"].shape
        (2, 8)
    """

    columns: Mapping[str, np.ndarray]
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        assert len({len(column) for column in self.columns.values()}) == 1, "columns of different length"
        if len(self) == 0:
            raise ConfigError("the training data has 0 rows; at least 1 is needed. Check data.train_urls.")

    def __len__(self) -> int:
        """Return the number of rows of one epoch."""
        return len(next(iter(self.columns.values())))

    def indices(self, step: int, batch_size: int) -> Int[np.ndarray, " batch"]:
        """Return which rows make up the batch of a step.

        Args:
            step: The 0-based optimizer step.
            batch_size: The number of rows of the whole batch.

        Returns:
            Row numbers. They depend on the seed, the step and the batch size alone. Every row comes once per epoch; a
            batch may reach over the end of an epoch.
        """
        places = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs, offsets = np.divmod(places, len(self))
        return np.concatenate([self._order(int(epoch))[offsets[epochs == epoch]] for epoch in np.unique(epochs)])

    def batch(self, step: int, batch_size: int, rows: slice) -> dict[str, np.ndarray]:
        """Return some rows of the batch of a step, see `Batches.batch`."""
        return self.take(self.indices(step, batch_size)[rows])

    def take(self, numbers: Sequence[int] | Int[np.ndarray, " row"]) -> dict[str, np.ndarray]:
        """Return the columns of some rows by their numbers."""
        chosen = np.asarray(numbers, np.int64)
        return {name: column[chosen] for name, column in self.columns.items()}

    def digest(self) -> str:
        """Return the SHA-256 of all rows and of their order in hexadecimal digits, for hosts to agree on."""
        digest = hashlib.sha256(f"{self.seed} {self.shuffle}".encode())
        for name, column in sorted(self.columns.items()):
            digest.update(f"{name} {column.dtype} {column.shape}".encode())
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    def _order(self, epoch: int) -> Int[np.ndarray, " row"]:
        if not self.shuffle:
            return np.arange(len(self))
        return _epoch_order(self.seed, epoch, len(self))


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, n_rows: int) -> Int[np.ndarray, " row"]:
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


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
    """

    sizes: tuple[int, ...]  # number of rows of each source
    weights: tuple[float, ...]
    seed: int
    shuffle: bool  # whether each epoch has an order of its own; otherwise all have the order of the files

    def rows(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the source and the number of the row there of each place."""
        drawn = []
        for place in places:
            source, count = self.turn(place)
            epoch, offset = divmod(count, self.sizes[source])
            drawn.append((source, self._shuffled(source, epoch, offset) if self.shuffle else offset))
        return drawn

    def turn(self, place: int) -> tuple[int, int]:
        """Return the source of a place, and how many places before it are that source's."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketOrder:
    """The order of the batches of a run.

    All rows of a batch are of one bucket. The buckets take turns in the ratio of their rows, so each has its epochs
    about when the others have. Within a bucket the order is a `RowOrder`: sources by weight, and each of them in an
    order of its own in every epoch.

    Args:
        sizes: The number of rows of each bucket of each source, ``sizes[source][bucket]``; in a source, the rows of a
            bucket come one after the other, those of the first bucket first.
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
        """Return the source and the number there of some rows of a batch."""
        turn, n_before = self._turns.turn(step)
        bucket, (sources, order) = self.buckets[turn], self._in_bucket[turn]
        places = range(n_before * batch_size, (n_before + 1) * batch_size)[rows]
        return [
            (sources[source], sum(self.sizes[sources[source]][:bucket]) + row) for source, row in order.rows(places)
        ]

    def first(self, count: int) -> list[Sequence[object]]:
        """Return the beginning of the order, by which another order is told from this one."""
        orders: list[Sequence[object]] = [order.rows(range(count)) for _, order in self._in_bucket]
        return orders if len(orders) == 1 else [*orders, [self._turns.turn(step) for step in range(count)]]

    @functools.cached_property
    def _turns(self) -> RowOrder:
        """The order of the buckets: a place is a step."""
        shares = [sum(self._share(source, bucket) for source in range(len(self.sizes))) for bucket in self.buckets]
        ones = (1,) * len(shares)
        return RowOrder(sizes=ones, weights=tuple(shares), seed=self.seed, shuffle=False)

    @functools.cached_property
    def _in_bucket(self) -> tuple[tuple[tuple[int, ...], RowOrder], ...]:
        """The sources that have rows for each bucket, and the order of these rows; empty buckets are left out."""
        orders = []
        for bucket in self.buckets:
            sources = tuple(source for source, sizes in enumerate(self.sizes) if sizes[bucket])
            sizes = tuple(self.sizes[source][bucket] for source in sources)
            weights = tuple(self._share(source, bucket) for source in sources)
            # A seed of its own: buckets of one size would otherwise have the same order.
            seed = self.seed + (bucket << 32)
            orders.append((sources, RowOrder(sizes=sizes, weights=weights, seed=seed, shuffle=self.shuffle)))
        return tuple(orders)

    def _share(self, source: int, bucket: int) -> float:
        """The share of a bucket's rows of a source in the mixture."""
        return self.weights[source] * (self.sizes[source][bucket] / sum(self.sizes[source]))


_BATCH = 32  # rows of a batch whose examples are looked at
_DIGESTED = 64  # places of the order that are in the digest: with another version of grain they might be others


class CachedRows:
    """The batches of a run (`lockstep.training.data.rows.Batches`): a pure function of the step."""

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
            slots = [place for place, (row_source, _) in enumerate(drawn) if row_source == source]
            for name, values in self.caches[source].take([drawn[place][1] for place in slots]).items():
                if name not in columns:
                    columns[name] = np.empty((len(drawn), *values.shape[1:]), values.dtype)
                columns[name][slots] = values
        return columns

    def examples(self, count: int) -> Iterator[tuple[str, Example]]:
        """Yield the examples of about ``count`` rows that the run begins with, each with its place; of all rows where
        there are no more. None comes twice.
        """
        places = [(source, row) for source, cache in enumerate(self.caches) for row in range(min(len(cache), count))]
        if len(self) > count:
            batches = [self.order.rows(step, _BATCH, slice(_BATCH)) for step in range(-(-count // _BATCH))]
            places = sorted({place for batch in batches for place in batch})
        for source, cache in enumerate(self.caches):
            numbers = [row for row_source, row in places if row_source == source]
            name = f" of source {source}" if len(self.caches) > 1 else ""
            for number, row in zip(numbers, cache.rows(numbers) if numbers else (), strict=True):
                pair = cache.metadata.layout == "pair"
                for example in [tuple(row)] if pair else [(sequence,) for sequence in row]:
                    yield f"row {number}{name}", example

    def digest(self) -> str:
        """Return the SHA-256 of all rows and of their order, and the version of the order, for hosts to agree on."""
        order = self.order
        parts = [cache.digest() for cache in self.caches], order.weights, order.seed, order.shuffle
        rows = hashlib.sha256(repr((*parts, *order.first(_DIGESTED))).encode()).hexdigest()
        return f"{rows} (version {ORDER_VERSION} of the order)"
