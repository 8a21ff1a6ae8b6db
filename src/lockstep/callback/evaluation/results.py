"""What a round of tasks found: scores by task, and a row for each answer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

PREFIX = "eval"
"""What the names of all scores begin with, and that of the table."""
TASK_COLUMNS = ("step", "task", "question_id", "prompt", "generated_text", "answer")
"""The columns of a row, in the order of the table; the scores of the row follow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRow:
    """How the model answered one question of a task.

    Args:
        step: The number of training steps completed.
        task: The task's name.
        question_id: The number of the question among those of its task.
        prompt: What the model was given, without its beginning where that was left out.
        generated_text: What it wrote; of a question with choices, the choice that it thinks most probable.
        answer: The task's own answer, as the harness compares it.
        metrics: The scores of this answer, by name.
    """

    columns: ClassVar[tuple[str, ...]] = TASK_COLUMNS

    step: int
    task: str
    question_id: int
    prompt: str
    generated_text: str
    answer: str
    metrics: Mapping[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """The row as one flat mapping: ``TASK_COLUMNS``, then its scores."""
        return {column: getattr(self, column) for column in TASK_COLUMNS} | dict(self.metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResults:
    """What a round of tasks found.

    Args:
        scores: For each task, and each group of tasks that has a mean, its scores by name: ``acc``, ``acc_stderr``; of
            a filter of the task's own, ``exact_match/strict-match``.
        rows: The answers in the order of the tasks and their questions.
        requests: The number of requests that the model answered.
        truncated: The number of requests whose beginning was left out because they were too long.
        seconds: The seconds that all hosts spent.
    """

    scores: Mapping[str, Mapping[str, float]]
    rows: list[TaskRow]
    requests: int
    truncated: int
    seconds: float = 0.0

    def scalars(self, step: int) -> dict[str, float]:
        """The numbers as a tracker gets them: ``eval/TASK/METRIC``.

        Args:
            step: The number of training steps completed; every task has it as its ``step``, the x-axis of its scores.
        """
        found: dict[str, float] = {}
        for task, scores in self.scores.items():
            found |= {f"{PREFIX}/{task}/{name}": value for name, value in scores.items()}
            found[f"{PREFIX}/{task}/step"] = step
        found[f"{PREFIX}/requests"] = self.requests
        found[f"{PREFIX}/truncated_requests"] = self.truncated
        found[f"{PREFIX}/seconds"] = self.seconds
        return found

    def describe(self) -> str:
        """The scores on one line, without their standard errors."""
        return ", ".join(
            f"{task} {name} {value:.4g}"
            for task, scores in self.scores.items()
            for name, value in scores.items()
            if "_stderr" not in name
        )
