"""One row of the samples table."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

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


def metric_names(rows: Iterable[Row]) -> tuple[str, ...]:
    """Names of the metrics that any of the rows has, in order of first appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row.metrics))
