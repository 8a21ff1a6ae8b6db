"""A rollout as training uses it: rows with advantages, and which of them each update has."""

import base64
import dataclasses
import io
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.json_text import typed


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """The answers of one rollout; the same on every host.

    Args:
        number: The 0-based number of the rollout.
        columns: Arrays by column, with the answer as axis 0.
        lengths: The number of tokens of each row that are no padding.
    """

    number: int
    columns: Mapping[str, np.ndarray]
    lengths: np.ndarray

    def minibatch(self, update: int, batch_size: int) -> slice:
        """Return the answers of an update: each iteration takes all minibatches in the same order.

        Args:
            update: The number of the update among those of the rollout.
            batch_size: The number of answers of one update.
        """
        begin = (update * batch_size) % len(self.lengths)
        return slice(begin, begin + batch_size)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values, for a checkpoint in the middle of its updates."""
        packed = io.BytesIO()
        np.savez_compressed(packed, allow_pickle=False, lengths=self.lengths, **self.columns)
        return {"number": self.number, "columns": base64.b64encode(packed.getvalue()).decode()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Rollout":
        """Return what `to_json` was called on, bit for bit.

        Args:
            values: What it returned.
        """
        columns = unpacked(values["columns"])
        return cls(number=typed(int, values["number"]), lengths=columns.pop("lengths"), columns=columns)


def unpacked(text: str) -> dict[str, np.ndarray]:
    """The arrays that `numpy.savez_compressed` packed, by name.

    Args:
        text: The file in base64.

    Raises:
        ValueError: It is something else.
    """
    try:
        with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as packed:
            return {name: packed[name] for name in packed.files}
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, MemoryError) as error:
        raise ValueError(f"packed arrays cannot be read: {error}") from error
