"""Rows of tokens as records of numbers: written, checked and parsed."""

import hashlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from jaxtyping import Float, Int

from lockstep.training.data.packing import Layout, Row

ROW, INDEX, VALUE = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
FLUSH_ROWS = 1000


class RowWriter:
    """Writes the rows of a chunk."""

    def __init__(self, rows: BinaryIO, index: BinaryIO) -> None:
        self._rows, self._index, self._hash = rows, index, hashlib.sha256()
        self._waiting: list[np.ndarray] = []
        self._ends = [0]
        self.count = 0  # the rows written so far
        self.tokens = 0  # their tokens

    def write(self, row: Row) -> None:
        """Write a row."""
        header = [len(row), *(number for sequence in row for number in (sequence.n_prompt, len(sequence.tokens)))]
        values = np.asarray([sequence.value for sequence in row if sequence.value is not None], VALUE).view(ROW)
        record = np.concatenate(
            [np.asarray(part, ROW) for part in (header, *(sequence.tokens for sequence in row), values)]
        )
        self._waiting.append(record)
        self._ends.append(self._ends[-1] + len(record))
        self.count += 1
        self.tokens += sum(len(sequence.tokens) for sequence in row)
        if len(self._waiting) >= FLUSH_ROWS:
            self._flush(self._ends.pop())

    def finish(self) -> str:
        """Write what is left, and return the SHA-256 of all rows in hexadecimal digits."""
        self._flush(None)
        return self._hash.hexdigest()

    def _flush(self, last: int | None) -> None:
        data = np.concatenate(self._waiting).tobytes() if self._waiting else b""
        self._hash.update(data)
        self._rows.write(data)
        self._index.write(np.asarray(self._ends, INDEX).tobytes())
        self._waiting, self._ends = [], [] if last is None else [last]


def check_record(record: Int[np.ndarray, " record"], layout: Layout, length: int, vocab_size: int | None) -> None:
    """Refuse a record that no `RowWriter` has written for rows of this layout and length.

    Args:
        vocab_size: The rows of the model's embedding; None where they are not known.

    Raises:
        ValueError: Its sizes do not go together, or it has a token that the model does not have.
    """
    count = int(record[0]) if len(record) else 0
    start = 1 + 2 * count
    if count < 1 or start > len(record) or count != {"single": 1, "pair": 2}.get(layout, count):
        raise ValueError(f"a row of {len(record)} numbers would have {count} sequences")
    prompts, sizes = record[1:start:2], record[2:start:2]
    total = int(sizes.sum(dtype=np.int64))
    longest = total if layout == "packed" else int(sizes.max())
    rest, n_values = len(record) - start - total, {"single": 1, "pair": 2}.get(layout, 0)
    if (prompts < 0).any() or (prompts > sizes).any() or longest > length or rest not in (0, n_values):
        raise ValueError(f"a row of {length} tokens would have sequences of {sizes.tolist()} tokens"[:200])
    tokens = record[start : start + total]
    highest = max(int(tokens.max()), int(~tokens.min())) if total else 0
    if vocab_size is not None and highest >= vocab_size:
        raise ValueError(f"a row has the token {highest}, and the model's embedding has {vocab_size} rows")


def parse_record(record: Int[np.ndarray, " record"]) -> Iterator[tuple[int, Int[np.ndarray, " token"]]]:
    """Yield the number of prompt tokens and all tokens of each sequence of a record."""
    n_sequences = int(record[0])
    start = 1 + 2 * n_sequences
    header = record[1:start].tolist()
    for n_prompt, size in zip(header[::2], header[1::2], strict=True):
        yield n_prompt, record[start : start + size]
        start += size


def parse_values(record: Int[np.ndarray, " record"]) -> Float[np.ndarray, " sequence"] | None:
    """Return the value of each sequence of a record, see `TokenSequence`; None where it has none."""
    n_sequences = int(record[0])
    start = 1 + 2 * n_sequences
    rest = record[start + int(record[2:start:2].sum()) :]
    return rest.view(VALUE) if len(rest) else None
