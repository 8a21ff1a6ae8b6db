"""A finished cache of tokenised rows: what is in it, and rows of it as arrays."""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.json_text import parse_json, refused, typed
from lockstep.training.data.packing import Layout
from lockstep.training.data.row_files import RowReader, parse_record, parse_reference
from lockstep.training.objectives import REFERENCE

FIX = "Remove this directory: the data is then tokenised again."
"""What to do with a cache that cannot be used."""
METADATA = "metadata.json"
"""The file that makes a directory a finished cache; it is written last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheMetadata:
    """What is in a cache.

    Args:
        layout: What a row holds.
        lengths: The tokens of a row of each bucket, ascending; one where rows are not put into buckets.
        chunk_rows: The number of rows of each chunk, those of the first bucket in all chunks, then of the next.
        digests: The SHA-256 of the rows of each chunk, in the same order.
        examples: The number of examples that are in it.
        unpacked_rows: The number of rows if each example had rows of its own.
        tokens: The tokens in all rows.
        dropped: Examples left out because their prompts fill a row.
        n_bad: The number of records that could not be used.
        bad: The first of them, each with its place and what is wrong.
    """

    layout: Layout
    lengths: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    digests: tuple[str, ...]
    examples: int
    unpacked_rows: int
    tokens: int
    dropped: int
    n_bad: int
    bad: tuple[str, ...]

    @property
    def length(self) -> int:
        """The tokens of a row, the longest where rows have several lengths."""
        return self.lengths[-1]

    @property
    def bucket_rows(self) -> tuple[int, ...]:
        """The number of rows of each bucket."""
        n_chunks = len(self.chunk_rows) // len(self.lengths)
        return tuple(sum(rows) for rows in itertools.batched(self.chunk_rows, n_chunks))

    @property
    def padding(self) -> float:
        """The share of all batches that is padding."""
        return self._padding(self.lengths)

    @property
    def padding_without_buckets(self) -> float:
        """The share of all batches that would be padding if all rows had the longest length."""
        return self._padding([self.length] * len(self.lengths))

    def _padding(self, lengths: Sequence[int]) -> float:
        positions = sum(rows * length for rows, length in zip(self.bucket_rows, lengths, strict=True))
        return 1 - self.tokens / (positions * (2 if self.layout == "pair" else 1)) if positions else 0.0

    @property
    def padding_without_packing(self) -> float:
        """The share of a batch that would be padding if each example had rows of its own."""
        return 1 - self.tokens / (self.unpacked_rows * self.length) if self.unpacked_rows else 0.0

    def summary(self) -> str:
        """What is in the cache, in a few words with the waste before and after packing or buckets."""
        unit = "pairs" if self.layout == "pair" else "examples"
        rows = [f"{n:,} rows of {length}" for n, length in zip(self.bucket_rows, self.lengths, strict=True)]
        text = f"{self.examples:,} {unit}, {self.tokens:,} tokens in {', '.join(rows)}"
        without = f" ({self.padding_without_packing:.1%} without packing)" if self.layout == "packed" else ""
        if len(self.lengths) > 1:
            without = f" ({self.padding_without_buckets:.1%} without data.length_buckets)"
        return f"{text}, {self.padding:.1%} of it padding{without}"


class TokenCache:
    """The rows of a finished cache; of them nothing is in memory but those that are asked for.

    It has the methods of a random-access data source of grain.

    Args:
        fs: The file system that it is on.
        path: Its directory.
        metadata: What is in it.
    """

    def __init__(self, fs: Any, path: str, metadata: CacheMetadata) -> None:
        self.path, self.metadata = path, metadata
        self.bucket_starts = np.cumsum([0, *metadata.bucket_rows])
        """The number of the first row of each bucket, and that of all rows."""
        self._reader = RowReader(fs, lambda chunk, suffix: chunk_file(path, chunk, suffix), metadata.chunk_rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._reader)

    def __getitem__(self, number: int) -> Mapping[str, np.ndarray]:
        """Return the columns of one row."""
        return {name: column[0] for name, column in self.take([number]).items()}

    def take(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """Read some rows. All have the length of the longest among them.

        Args:
            numbers: The numbers of the rows.

        Returns:
            The columns ``tokens`` int32 ``[row, position]`` and ``loss_mask`` bool of the same shape, for packed rows
            ``segment_ids`` int32 too; for pairs ``[row, 2, position]``, chosen and rejected, and where the records
            have them ``reference_logprobs`` float32 ``[row, 2]``.
        """
        bucket = int(np.searchsorted(self.bucket_starts, max(numbers), side="right")) - 1
        return expand(self._reader.read(numbers), self.metadata.layout, self.metadata.lengths[bucket])

    def digest(self) -> str:
        """Return the SHA-256 of all rows in hexadecimal digits."""
        metadata = self.metadata
        return hashlib.sha256(repr((metadata.layout, *metadata.lengths, metadata.digests)).encode()).hexdigest()


def expand(records: Sequence[np.ndarray], layout: Layout, length: int) -> dict[str, np.ndarray]:
    """Make the columns of rows, see `TokenCache.take`.

    The first token of a sequence is never a target. In a packed row the documents are numbered from 1, and padding
    has the number 0.

    Args:
        records: The records of the rows, see `parse_record`.
        layout: What a row holds.
        length: The tokens of a row.
    """
    shape = (len(records), 2, length) if layout == "pair" else (len(records), 1, length)
    tokens, mask, segments = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32)
    for row, record in enumerate(records):
        start = side = 0
        for number, (n_prompt, sequence) in enumerate(parse_record(record)):
            if layout == "pair":
                start, side = 0, number
            end = start + len(sequence)
            tokens[row, side, start:end] = np.where(sequence < 0, ~sequence, sequence)
            first = max(n_prompt, 1)
            mask[row, side, start + first : end] = sequence[first:] >= 0
            if layout == "packed":
                segments[row, side, start:end] = number + 1
            start = end
    columns = {"tokens": tokens, "loss_mask": mask} | ({"segment_ids": segments} if layout == "packed" else {})
    if layout != "pair":
        return {name: column[:, 0] for name, column in columns.items()}
    reference = [one for one in map(parse_reference, records) if one is not None]
    return {**columns, REFERENCE: np.stack(reference)} if reference else columns


def chunk_file(path: str, chunk: int, suffix: str) -> str:
    """Return the path of a file of a chunk.

    Args:
        path: The directory of the cache.
        chunk: The number of the chunk.
        suffix: Which file: ``rows``, ``index`` or ``json``.
    """
    return f"{path}/chunk-{chunk:05d}.{suffix}"


def read_metadata(fs: Any, path: str) -> CacheMetadata | None:
    """Return what is in a cache; None where it is not finished.

    Args:
        fs: The file system that it is on.
        path: Its directory.
    """
    try:
        text = fs.cat_file(f"{path}/{METADATA}")
    except FileNotFoundError:
        return None
    values = parse_json(text, f"{path}/{METADATA}", dict, FIX)
    with refused(f"{path}/{METADATA}", FIX):
        return typed(CacheMetadata, values)
