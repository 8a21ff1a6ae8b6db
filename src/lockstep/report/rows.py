"""The rows of the samples tables: one completion each."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from lockstep.health import AnsweredPrompt, Health
from lockstep.printable import get_logger
from lockstep.text import THINKING, Answer, Prompt, split_answer
from lockstep.types import Completion

log = get_logger(__name__)

COLUMNS = (
    "step",
    "prompt_id",
    "generation_id",
    "prompt",
    "generated_text",
    "num_tokens",
    "finish_reason",
    "mean_logprob",
    "health",
    "loop_from",
)
"""The columns of every row of a training run, in the order of the table; metrics follow."""

HEALTH_COLUMNS = ("health", "loop_from")
"""The columns with the health of an answer, a text and a number or null; those of a run without it are null."""

TOKEN_COLUMNS = ("tokens", "token_logprobs")
"""The columns of a file with each token's text and its natural-log probability: two lists of the same length."""

TOKEN_IDS, LOGPROBS = KEPT_COLUMNS = ("token_ids", "logprobs")
"""The columns of a file with each token's id and its natural-log probability: two lists of the same length."""

REASONING, CONTENT = "reasoning", "content"
PART_COLUMNS = (REASONING, CONTENT)
"""The columns of a file with the parts of an answer, two texts, where it has more than one (`lockstep.text.Answer`)."""

FIELDS = "fields"  # the column of a file with the further fields of a prompt's line, an object

TURNS = "turns"  # the column of a file with the messages of a conversation, a list of objects

FILE_COLUMNS = (*PART_COLUMNS, *TOKEN_COLUMNS, *KEPT_COLUMNS, FIELDS, TURNS)
"""The columns that only a file has; their values are texts, lists, those of `FIELDS` objects."""

SAMPLE_COLUMNS = ("round", "prompt_id", "generation_id", "prompt", "generated_text", "num_tokens")
"""The columns of a row of ``lockstep sample``, in the order of its table; metrics follow."""


class TableRow(Protocol):
    """A row of a table: the names of its first columns, and one flat mapping."""

    columns: ClassVar[tuple[str, ...]]

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The value of each metric, None where there is none, by its name: the columns after the first ones."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The row as one flat mapping, from which a table takes its columns."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRow:
    """One completion as text: the base of `Row` and `SampleRow`.

    Args:
        metrics: The value of each metric, by the metric's name; None where it has no value for this row.
        prompt_end: The end of the prompt's text, which may open the model's reasoning (`lockstep.text.split_answer`).
        fields: The further fields of the prompt's line, for the file alone.
        kept: The token ids and their natural-log probabilities, for the file alone; None for none.
        health: The states that say how it went wrong, with a space between two (`lockstep.health.State`); empty where
            it did not, None where nobody looked.
        loop_from: The index of the token with which its loop begins; None where there is none.
        turns: The messages of a conversation, those of the prompt too (`lockstep.report.turns`); empty where the model
            answers once.
    """

    columns: ClassVar[tuple[str, ...]]

    prompt_id: int
    generation_id: int  # the completion's number among those of its prompt: 0 to `n_generations - 1`
    prompt: str
    generated_text: str
    num_tokens: int  # number of tokens sampled, a stop token included
    finish_reason: str  # why the completion ended: `stop`, `length`, `budget` or `cancelled`
    mean_logprob: float  # the mean natural-log probability of the sampled tokens; 0 where none was sampled
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    prompt_end: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kept: tuple[tuple[int, ...], tuple[float, ...]] | None = None
    health: str | None = None
    loop_from: int | None = None
    turns: Sequence[Mapping[str, Any]] = ()

    def answered(self, prompt: Prompt, completion: Completion, prompt_tokens: Sequence[int]) -> AnsweredPrompt:
        """The prompt and the completion that it is the row of, as `lockstep.health` looks at them."""
        return AnsweredPrompt(
            prompt=prompt,
            completion=completion,
            text=self.generated_text,
            prompt_tokens=prompt_tokens,
            prompt_end=self.prompt_end,
        )

    def with_health(self, health: Health) -> Self:
        """The row with what was measured of its answer."""
        return dataclasses.replace(self, health=str(health), loop_from=health.loop_from)

    @property
    def reasoning(self) -> str | None:
        """The part before the final answer, such as between ``<think>`` and ``</think>``; None where there is none."""
        return self._answer.reasoning

    @property
    def content(self) -> str:
        """The final answer, which metrics and rewards read: ``generated_text`` where the model did not reason before;
        empty where it did not get to it.
        """
        return self._answer.content

    @functools.cached_property
    def _answer(self) -> Answer:
        return split_answer(self.generated_text, self.prompt_end)

    @property
    def _further(self) -> dict[str, Any]:
        """The columns of a file with the parts of the answer, where it has more than one, and the prompt's fields."""
        parts = {} if self.reasoning is None else {REASONING: self.reasoning, CONTENT: self.content}
        return {**parts, **({FIELDS: dict(self.fields)} if self.fields else {})}

    @property
    def _kept(self) -> dict[str, list[Any]]:
        return {name: list(values) for name, values in zip(KEPT_COLUMNS, self.kept or (), strict=False)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The row that ``to_dict`` or ``to_record`` was called on, without the texts of its tokens.

        Args:
            values: The columns of the row; the values beyond its own and ``FILE_COLUMNS`` are metrics.
        """
        own: dict[str, Any] = {
            name: values[name] for name in (*cls.columns, "finish_reason") if name not in HEALTH_COLUMNS
        }
        if "mean_logprob" in own:
            own["mean_logprob"] = float(own["mean_logprob"])
        known = (*own, *HEALTH_COLUMNS, *FILE_COLUMNS)
        return cls(
            **own,
            health=values.get("health"),  # earlier versions wrote none
            loop_from=values.get("loop_from"),
            # A number, its name where it is not finite, or nothing.
            metrics={
                name: None if value is None else float(value) for name, value in values.items() if name not in known
            },
            fields=values.get(FIELDS, {}),
            prompt_end=_prompt_end(values),
            kept=(tuple(values[TOKEN_IDS]), tuple(values.get(LOGPROBS, ()))) if TOKEN_IDS in values else None,
        )

    @classmethod
    def from_completion(
        cls, completion: Completion, prompt: Prompt, text: str, *, keep_tokens: bool = False, **when: Any
    ) -> Self:
        """The row of a completion, without metrics.

        Args:
            text: The text of the answer, up to a stop string.
            keep_tokens: Whether it keeps the ids and log-probabilities of its tokens.
            **when: Further fields of the row, of which ``step`` or ``round`` says when it was sampled.
        """
        logprob = float(np.mean(completion.logprobs)) if completion.logprobs else 0.0
        if math.isnan(logprob):
            _warn_of_nan()
        return cls(
            prompt_id=completion.prompt_id,
            generation_id=completion.generation_id,
            prompt=prompt.shown,
            generated_text=text,
            num_tokens=len(completion.tokens),
            finish_reason=str(completion.finish_reason),
            mean_logprob=logprob,
            fields=prompt.fields,
            kept=(tuple(map(int, completion.tokens)), tuple(map(float, completion.logprobs))) if keep_tokens else None,
            **when,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(CompletionRow):
    """The model's completion of one prompt after one training step.

    Args:
        tokens: The text that each token added and its natural-log probability, for the file alone; empty for none.

    Example:
        >>> row = lockstep.report.Row(
        ...     step=10,
        ...     prompt_id=0,
        ...     generation_id=0,
        ...     prompt="2 + 2 =",
        ...     generated_text=" 4",
        ...     num_tokens=2,
        ...     finish_reason="stop",
        ...     mean_logprob=-0.1,
        ...     metrics={"exact_match": 1.0},
        ... )
        >>> row.to_dict()["exact_match"]
        1.0
    """

    columns: ClassVar[tuple[str, ...]] = COLUMNS

    step: int
    tokens: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The row as one flat mapping: ``COLUMNS``, then its metrics."""
        return {column: getattr(self, column) for column in COLUMNS} | dict(self.metrics)

    def to_record(self) -> dict[str, Any]:
        """The row as a file has it: ``to_dict``, and the tokens where there are any."""
        columns = zip(TOKEN_COLUMNS, zip(*self.tokens, strict=True), strict=False)
        return self.to_dict() | self._further | {name: list(values) for name, values in columns} | self._kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRow(CompletionRow):
    """A checkpoint's completion of one prompt in one round of ``lockstep sample``.

    Its ``mean_logprob`` is for metrics; it is not written, because its last digits depend on how the model is split
    over devices.
    """

    columns: ClassVar[tuple[str, ...]] = SAMPLE_COLUMNS

    round: int  # number of the round, from 0
    mean_logprob: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The row as it is written: ``SAMPLE_COLUMNS``, how it ended, its health, its prompt's further fields, metrics,
        tokens.
        """
        columns = {column: getattr(self, column) for column in SAMPLE_COLUMNS}
        health = {} if self.health is None else {column: getattr(self, column) for column in HEALTH_COLUMNS}
        ended = {"finish_reason": self.finish_reason}
        return {**columns, **ended, **health, **self._further, **self.metrics, **self._kept}


def metric_names(rows: Iterable[TableRow]) -> tuple[str, ...]:
    """The names of the metrics that any of some rows has, in order of first appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row.metrics))


@functools.cache
def _warn_of_nan() -> None:
    log.warning(
        "answers have log-probabilities that are no numbers (NaN), so their tokens mean nothing: a weight of the model "
        "is NaN or infinite, or a sum in float16 was. Take an earlier checkpoint, or another dtype."
    )


def _prompt_end(values: Mapping[str, Any]) -> str:
    """The end of a prompt that opens the reasoning, where a row of a file has some and its text has no marker of it."""
    has_parts = values.get(REASONING) is not None and split_answer(values["generated_text"]).reasoning is None
    return THINKING[0][0] if has_parts else ""
