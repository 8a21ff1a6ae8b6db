"""Tokenised training rows, and the order in which a run draws them."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from lockstep.errors import ConfigError


class Batches(Protocol):
    """The batches of a run: a pure function of the step, so that every host draws the same order."""

    def batch(self, step: int, batch_size: int, rows: slice) -> Mapping[str, np.ndarray]:
        """Return some rows of the batch of a step.

        Args:
            step: The 0-based optimizer step.
            batch_size: The number of rows of the whole batch.
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
        """All lengths of the last axis of the columns, ascending; the train step is compiled for each of them."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedRows:
    """A data set in host memory: arrays of equal length, drawn epoch by epoch.

    Args:
        columns: Arrays by name, with the row as axis 0.
        seed: The seed of the order.
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
        found = hashlib.sha256(f"{self.seed} {self.shuffle}".encode())
        for name, column in sorted(self.columns.items()):
            found.update(f"{name} {column.dtype} {column.shape}".encode())
            found.update(np.ascontiguousarray(column).data)
        return found.hexdigest()

    def _order(self, epoch: int) -> Int[np.ndarray, " row"]:
        if not self.shuffle:
            return np.arange(len(self))
        return _permutation(self.seed, epoch, len(self))


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, n_rows: int) -> Int[np.ndarray, " row"]:
    return np.random.default_rng((seed, epoch)).permutation(n_rows)
