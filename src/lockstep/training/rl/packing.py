"""The answers of a minibatch in as few rows as they need: the place of each is a function of the lengths alone."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Bool, Int, Num

from lockstep.placement import batch_spec, host_rows, place_local
from lockstep.training.objectives import ROUTING

MOST_ANSWERS: Final = 16
"""Answers that a row has at most: the loss looks at a row once for each that there can be."""


def answers_per_row(row_length: int) -> int:
    """Return the number of answers that a row of so many tokens can have."""
    return max(1, min(MOST_ANSWERS, row_length // 2))  # a prompt and its answer have a token at least


def packed_columns(columns: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and type of one packed row of each column.

    Args:
        columns: Those of the row of one answer.

    Returns:
        The same for columns of tokens; ``[answer]`` for those with one number for each answer; and ``segment_ids``
        ``[position]``, the number of each token's answer in its row from 1 on, 0 for padding.
    """
    tokens = columns["tokens"]
    answers = (answers_per_row(*tokens.shape),)
    packed = {name: jax.ShapeDtypeStruct(column.shape or answers, column.dtype) for name, column in columns.items()}
    return packed | {"segment_ids": jax.ShapeDtypeStruct(tokens.shape, np.int32)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The places of answers in rows, by first fit decreasing: the longest answer first, of equal ones the earlier, each
    into the first row that has room for all of it (Johnson 1973, https://hdl.handle.net/1721.1/57819).

    There are as many rows as answers; those that are not needed are empty. The devices get rows in turn, so that on
    each of them the empty ones are the last.

    Args:
        row_length: The tokens of a row.
        lengths: The tokens of each answer with its prompt; 0: it is left out.
        rows: The row of each answer.
        begins: The position of its first token.
        ordinals: Its number among the answers of its row, from 0.
    """

    row_length: int
    lengths: Int[np.ndarray, " answer"]
    rows: Int[np.ndarray, " answer"]
    begins: Int[np.ndarray, " answer"]
    ordinals: Int[np.ndarray, " answer"]

    @classmethod
    def of(cls, lengths: Int[np.ndarray, " answer"], row_length: int, shards: int) -> Self:
        """Return the places of answers.

        Args:
            lengths: The tokens of each answer with its prompt, at most ``row_length``; 0 leaves it out.
            shards: The number of equal parts that the rows are split into over the devices.
        """
        count, most = len(lengths), answers_per_row(row_length)
        tokens, answers, rows, begins, ordinals = np.zeros((5, count), np.int64)
        for answer in np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]:
            row = int(np.argmax((tokens + lengths[answer] <= row_length) & (answers < most)))
            rows[answer], begins[answer], ordinals[answer] = row, tokens[row], answers[row]
            tokens[row] += lengths[answer]
            answers[row] += 1
        in_turn = rows % shards * (count // shards) + rows // shards
        return cls(row_length=row_length, lengths=lengths, rows=in_turn, begins=begins, ordinals=ordinals)

    @property
    def filled(self) -> int:
        """The number of rows with answers."""
        return len(np.unique(self.rows[self.lengths > 0]))

    def pack(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return packed rows, with ``segment_ids``.

        Args:
            columns: Columns ``[answer, position, ...]``, or ``[answer]``.
        """
        count, packed = len(self.lengths), {}
        for name, column in columns.items():
            if column.ndim == 1:
                included = self.lengths > 0
                packed[name] = np.zeros((count, answers_per_row(self.row_length)), column.dtype)
                packed[name][self.rows[included], self.ordinals[included]] = column[included]
            else:
                packed[name] = np.full(column.shape, -1 if name in ROUTING else 0, column.dtype)
                packed[name][self._places] = column[self._tokens]
        packed["segment_ids"] = np.zeros((count, self.row_length), np.int32)
        packed["segment_ids"][self._places] = np.repeat(self.ordinals + 1, self.lengths)
        return packed

    def place(self, columns: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
        """Return packed rows as global arrays, see `pack`."""
        sharding, count = NamedSharding(mesh, batch_spec(mesh)), len(self.lengths)
        own = host_rows(sharding, count)
        return {name: place_local(rows[own], sharding, count) for name, rows in self.pack(columns).items()}

    def unpack(self, packed: Num[np.ndarray, "row position"]) -> Num[np.ndarray, "answer position"]:
        """Return the numbers of the tokens of each answer from those of packed rows; 0 behind them."""
        numbers = np.zeros_like(packed)
        numbers[self._tokens] = packed[self._places]
        return numbers

    @functools.cached_property
    def _tokens(self) -> Bool[np.ndarray, "answer position"]:
        tokens: Bool[np.ndarray, "answer position"] = np.arange(self.row_length) < self.lengths[:, None]
        return tokens

    @functools.cached_property
    def _places(self) -> tuple[Any, Any]:
        """Row and position of the tokens that `_tokens` names, in its order."""
        answers, offsets = np.nonzero(self._tokens)
        return self.rows[answers], self.begins[answers] + offsets
