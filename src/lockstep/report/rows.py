"""One row of the samples table."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

COLUMNS = (
    "step",
    "prompt_id",
    "generation_id",
    "prompt",
    "generated_text",
    "num_tokens",
    "finish_reason",
    "mean_logprob",
)
"""Columns that every row has, in the order of the table; metrics follow."""


SAMPLE_COLUMNS = ("round", "prompt_id", "generation_id", "prompt", "generated_text", "num_tokens")
"""Columns of a row of ``lockstep sample`` in the order of its table; metrics follow."""


class TableRow(Protocol):
    """What a table takes: the names of its first columns, and one flat mapping per row."""

    columns: ClassVar[tuple[str, ...]]

    @property
    def metrics(self) -> Mapping[str, float]:
        """A value by metric name; columns after the first ones."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The row as one flat mapping; a table takes its columns from it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What the model said to one prompt at one step.

    Args:
        step: training steps completed.
        prompt_id: the prompt's number.
        generation_id: 0 to ``n_generations - 1``.
        prompt: the prompt's text.
        generated_text: the answer's text.
        num_tokens: tokens sampled, a stop token included.
        finish_reason: ``stop``, ``length``, ``budget`` or ``cancelled``.
        mean_logprob: mean natural-log probability of the sampled tokens; 0 where none was sampled.
        metrics: a value by metric name.
    """

    columns: ClassVar[tuple[str, ...]] = COLUMNS

    step: int
    prompt_id: int
    generation_id: int
    prompt: str
    generated_text: str
    num_tokens: int
    finish_reason: str
    mean_logprob: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The row as one flat mapping: ``COLUMNS``, then its metrics."""
        return {column: getattr(self, column) for column in COLUMNS} | dict(self.metrics)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Row":
        """The row that ``to_dict`` was called on; fields beyond ``COLUMNS`` are metrics.

        Raises:
            KeyError: a column is missing.
        """
        metrics = {name: float(value) for name, value in values.items() if name not in COLUMNS}
        columns = {column: values[column] for column in COLUMNS}
        return cls(**columns | {"mean_logprob": float(columns["mean_logprob"])}, metrics=metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRow:
    """What a checkpoint said to one prompt in one round of ``lockstep sample``.

    Args:
        round: from 0.
        prompt_id: the prompt's number.
        generation_id: 0 to ``n_generations - 1``.
        prompt: the prompt's text.
        generated_text: the answer's text.
        num_tokens: tokens sampled, a stop token included.
        finish_reason: ``stop`` or ``length``.
        mean_logprob: mean natural-log probability of the sampled tokens, for metrics; not written, because its last
            digits depend on how the model is split over devices.
        metrics: a value by metric name.
    """

    columns: ClassVar[tuple[str, ...]] = SAMPLE_COLUMNS

    round: int
    prompt_id: int
    generation_id: int
    prompt: str
    generated_text: str
    num_tokens: int
    finish_reason: str
    mean_logprob: float = 0.0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The row as it is written: ``SAMPLE_COLUMNS``, how it ended, then its metrics."""
        columns = {column: getattr(self, column) for column in SAMPLE_COLUMNS}
        return {**columns, "finish_reason": self.finish_reason, **self.metrics}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SampleRow":
        """The row that ``to_dict`` was called on.

        Raises:
            KeyError: a column is missing.
        """
        own = (*SAMPLE_COLUMNS, "finish_reason")
        metrics = {name: float(value) for name, value in values.items() if name not in own}
        return cls(**{name: values[name] for name in own}, metrics=metrics)


def metric_names(rows: Iterable[TableRow]) -> tuple[str, ...]:
    """Names of the metrics that any of the rows has, in order of first appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row.metrics))
