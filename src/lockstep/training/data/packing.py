"""Examples into rows of one length: one each, cut, or several in a row."""

import bisect
import dataclasses
from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np

from lockstep.training.data.examples import Example, TokenSequence
from lockstep.training.data.records import BadRow

OPEN_ROWS = 64  # rows that wait for a short example; the one with least room goes when all are open and none has room

type Row = list[TokenSequence]
"""The content of a row: one sequence or, in a packed row, several, one after the other; of a pair both."""

type Layout = Literal["single", "packed", "pair"]
"""The layout of a row: one sequence; several in one sequence; or two sequences side by side."""

type ExampleKind = Literal["answers", "documents", "questions"]
"""The kind of examples: each ends with an answer; is a document, or a part of one; or is a question alone."""


class Packer(Protocol):
    """Makes rows of examples."""

    def add(self, example: Example) -> Iterator[Row]:
        """Take an example and yield the rows that are complete."""
        ...

    def finish(self) -> Iterator[Row]:
        """Yield what is left."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShape:
    """The shape of rows that examples become."""

    length: int
    truncate: bool  # whether an example that is longer is cut
    packing: bool  # whether a row holds several examples
    documents: bool  # whether examples are documents, which may go on in another row
    pairs: bool  # whether an example is a pair
    shorter: tuple[int, ...] = ()  # the tokens of shorter rows, ascending, for what fits into them; not for packed rows

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of a row of each bucket, ascending."""
        return (*self.shorter, self.length)

    def bucket(self, row: Row) -> int:
        """Return the number of the bucket whose rows are just long enough for all sequences of a row."""
        return bisect.bisect_left(self.lengths, max(len(sequence.tokens) for sequence in row)) if self.shorter else 0

    @property
    def layout(self) -> Layout:
        """The layout of a row."""
        return "pair" if self.pairs else "packed" if self.packing else "single"

    def packer(self) -> Packer:
        """Make what makes the rows of a chunk."""
        if self.documents:
            return _CutDocuments(self.length, together=self.packing)
        return _FirstFit(self.length) if self.packing else _OneEach()

    def fit(self, example: Example) -> Example | BadRow | None:
        """Cut an example to the length of a row.

        Returns:
            The example that fits; what is wrong where it does not; None where its prompt leaves no room for a target.
        """
        if self.documents:
            return example
        for name, sequence in zip(("(chosen) ", "(rejected) ") if self.pairs else ("",), example, strict=True):
            size = len(sequence.tokens)
            if size > self.length and not self.truncate:
                return BadRow(
                    f"{name}has {size} tokens, but a row has {self.length}. Raise data.max_seq_len to at least {size}, "
                    "shorten the example, or set data.truncate: true to cut it."
                )
        if any(sequence.n_prompt >= self.length for sequence in example):
            return None
        return tuple(dataclasses.replace(sequence, tokens=sequence.tokens[: self.length]) for sequence in example)


class _OneEach:
    def add(self, example: Example) -> Iterator[Row]:
        yield list(example)

    def finish(self) -> Iterator[Row]:
        yield from ()


class _CutDocuments:
    """Cuts documents into rows, one after the other without a gap where they are ``together``."""

    def __init__(self, length: int, *, together: bool) -> None:
        self._length, self._together = length, together
        self._row: Row = []
        self._room = length

    def add(self, example: Example) -> Iterator[Row]:
        (document,) = example
        tokens = np.asarray(document.tokens, np.int32)  # cut without a copy
        start = 0
        while start < len(tokens):
            piece = tokens[start : start + self._room]
            self._row.append(TokenSequence(0, piece))
            start, self._room = start + len(piece), self._room - len(piece)
            if not self._room:
                yield from self._take()
        if not self._together:
            yield from self._take()

    def finish(self) -> Iterator[Row]:
        yield from self._take()

    def _take(self) -> Iterator[Row]:
        row, self._row, self._room = self._row, [], self._length
        # A sequence of one token has no target; a row of such sequences has no share in the loss.
        if any(len(sequence.tokens) > 1 for sequence in row):
            yield row


class _FirstFit:
    """Puts each example into the first open row that has room for all of it."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._open: list[tuple[int, Row]] = []

    def add(self, example: Example) -> Iterator[Row]:
        (sequence,) = example
        size = len(sequence.tokens)
        place = next((i for i, (room, _) in enumerate(self._open) if room >= size), None)
        if place is None:
            if len(self._open) == OPEN_ROWS:
                yield self._open.pop(min(range(OPEN_ROWS), key=lambda i: self._open[i][0]))[1]
            self._open.append((self._length, []))
            place = len(self._open) - 1
        room, row = self._open[place]
        row.append(sequence)
        self._open[place] = (room - size, row)

    def finish(self) -> Iterator[Row]:
        rows, self._open = self._open, []
        yield from (row for _, row in rows)
