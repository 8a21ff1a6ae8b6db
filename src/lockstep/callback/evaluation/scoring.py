"""Scores and rows of tasks from what lm-evaluation-harness says; a metric that fails costs its own score alone."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from lockstep.plugins import own_error_text
from lockstep.printable import get_logger

log = get_logger(__name__)

PREFIX = "eval"  # the beginning of the names of all scores, and of that of the table
TASK_COLUMNS = ("step", "task", "question_id", "prompt", "generated_text", "answer")
"""The columns of a row, in the order of the table; the scores of the row follow."""
NO_FILTER = "none"  # the harness's name for scores of answers as they are
MUTUAL_INFO = "acc_mutual_info"  # the metric for which the harness asks for each choice without its context too

type Aggregation = Callable[[Any], Any]
"""A function of a metric's values for all questions that returns the score of the task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRow:
    """The model's answer to one question of a task."""

    columns: ClassVar[tuple[str, ...]] = TASK_COLUMNS

    step: int
    task: str
    question_id: int  # number of the question among those of its task
    prompt: str  # what the model was given, without its beginning where that was left out
    generated_text: str  # what it wrote; of a question with choices, the choice that it thinks most probable
    answer: str  # the task's own answer, as the harness compares it
    metrics: Mapping[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """The row as one flat mapping: ``TASK_COLUMNS``, then its scores."""
        return {column: getattr(self, column) for column in TASK_COLUMNS} | dict(self.metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResults:
    """Scores and answers of a round of tasks.

    Args:
        scores: For each task, and each group of tasks that has a mean, its scores by name: ``acc``, ``acc_stderr``; of
            a filter of the task's own, ``exact_match/strict-match``.
        failures: For each score that could not be computed, a text with task, metric and error.
    """

    scores: Mapping[str, Mapping[str, float]]
    rows: list[TaskRow]  # the answers in the order of the tasks and their questions
    requests: int = 0
    truncated: int = 0  # number of requests whose beginning was left out because they were too long
    seconds: float = 0.0
    failures: Sequence[str] = ()

    def scalars(self, step: int) -> dict[str, float]:
        """The numbers as a tracker gets them: ``eval/TASK/METRIC``."""
        values: dict[str, float] = {}
        for task, scores in self.scores.items():
            values |= {f"{PREFIX}/{task}/{name}": value for name, value in scores.items()}
            values[f"{PREFIX}/{task}/step"] = step
        values[f"{PREFIX}/requests"] = self.requests
        values[f"{PREFIX}/truncated_requests"] = self.truncated
        values[f"{PREFIX}/failed_scores"] = len(self.failures)
        values[f"{PREFIX}/seconds"] = self.seconds
        return values

    def describe(self) -> str:
        """The scores on one line, without their standard errors."""
        return ", ".join(
            f"{task} {name} {value:.4g}"
            for task, scores in self.scores.items()
            for name, value in scores.items()
            if "_stderr" not in name
        )


class ScoringGuard:
    """Lets the harness go on where a task's own code fails while answers are scored, and keeps what failed.

    The harness scores all tasks in one call, which ends with the first error, after every answer was paid for. A score
    that fails is NaN to it, and so are the means of groups that the score is part of; all are left out of the results.
    """

    def __init__(self) -> None:
        self.failures: dict[tuple[str, str], str] = {}
        """The first failure of each task and metric. A metric without a name stands for all of the task."""

    def protect(self, name: str, task: Any) -> None:
        """Replace the functions of a task that score its answers."""
        # Attributes of the object: the harness calls them on it, whatever its class is.
        task.apply_filters = self._filtering(name, task, task.apply_filters)
        task.process_results = self._question_scoring(name, task, task.process_results)
        task.aggregation = self._aggregations(name, task.aggregation)

    def failed(self, task: str, metric: str = "") -> bool:
        """Whether a score of a task, or all of them, could not be computed."""
        return (task, "") in self.failures or (task, metric) in self.failures

    def _keep(self, task: str, metric: str, reason: str) -> None:
        of = f"the metric {metric}" if metric else "none of its metrics"
        verb = "cannot be computed" if metric else "can be computed"
        self.failures.setdefault(
            (task, metric),
            f"task {task}: {of} {verb}: {reason}. Correct the task's file, or leave the metric out of its metric_list",
        )

    def _filtering(self, name: str, task: Any, apply_filters: Callable[[], Any]) -> Callable[[], Any]:
        def guarded() -> Any:
            try:
                return apply_filters()
            except (Exception, SystemExit) as error:  # a task's file is a program of the user's
                self._keep(name, "", f"a filter of its filter_list raised {own_error_text(error)}")
            for instance in task.instances:
                instance.filtered_resps.setdefault(NO_FILTER, instance.resps[0])
            return None

        return guarded

    def _question_scoring(
        self, name: str, task: Any, process_results: Callable[[Any, Any], Any]
    ) -> Callable[[Any, Any], Mapping[str, Any]]:
        def guarded(doc: Any, results: Any) -> Mapping[str, Any]:
            if not self.failed(name):
                try:
                    scored = process_results(doc, results)
                except (Exception, SystemExit) as error:
                    metrics = ", ".join(task.aggregation()) or "no metric"
                    self._keep(name, "", f"scoring a question ({metrics}) raised {own_error_text(error)}")
                else:
                    if isinstance(scored, Mapping):
                        return scored
                    self._keep(name, "", f"scoring a question returned a {type(scored).__name__}, no mapping")
            return {}

        return guarded

    def _aggregations(
        self, name: str, aggregation: Callable[[], Mapping[str, Aggregation]]
    ) -> Callable[[], Mapping[str, Aggregation]]:
        def guarded(metric: str, function: Aggregation) -> Aggregation:
            def value(items: Any) -> Any:
                if self.failed(name):
                    return math.nan
                work = f"its aggregation over {len(items)} questions"
                try:
                    score = function(items)
                except (Exception, SystemExit) as error:
                    self._keep(name, metric, f"{work} raised {own_error_text(error)}")
                    return math.nan
                if not (_is_number(score) and math.isfinite(score)):
                    self._keep(name, metric, f"{work} is {score!r:.80}, no finite number")
                    return math.nan
                return score

            return value

        return lambda: _Aggregations(aggregation(), guarded)


class _Aggregations(dict[str, Aggregation]):
    """Guarded aggregations of a task's metrics; the mean for a metric that has none, as in the harness."""

    def __init__(self, functions: Mapping[str, Aggregation], guarded: Callable[[str, Aggregation], Aggregation]):
        from lm_eval.api.metrics import mean

        super().__init__({metric: guarded(metric, function) for metric, function in functions.items()})
        self.means = {metric for metric, function in functions.items() if function is mean}
        self._guarded, self._mean = guarded, mean

    def __missing__(self, metric: str) -> Aggregation:
        return self._guarded(metric, self._mean)


def make_results(step: int, tasks: Mapping[str, Any], evaluated: Mapping[str, Any], guard: ScoringGuard) -> TaskResults:
    """Make the results of a round.

    Args:
        tasks: The harness's tasks by name.
        evaluated: What its ``evaluate`` returned.
        guard: What protected the tasks.
    """
    samples: Mapping[str, list[Mapping[str, Any]]] = evaluated["samples"]
    failures = list(guard.failures.values())
    scores: dict[str, dict[str, float]] = {}
    for name, values in evaluated["results"].items():
        scores[name] = {}
        for metric, filter_name, value in _scores(values):
            if name in tasks:
                if guard.failed(name, metric):
                    continue
            elif math.isnan(value) and guard.failures:
                failures.append(f"group {name}: it has no {metric}, because a task of it has none")
                continue
            scores[name][_score_name(metric, filter_name)] = value
    without = [name for name in tasks if not scores.get(name) and name not in {task for task, _ in guard.failures}]
    failures += [f"task {name}: it has no score. Check what its process_results returns" for name in without]
    for name, task in tasks.items():
        _warn_of_spaces(name, scores[name], samples[name])
        if not guard.failed(name):
            scores[name] |= _standard_errors(task, samples[name])
    return TaskResults(
        scores={name: values for name, values in scores.items() if values},
        rows=[row for name, task in tasks.items() for row in _rows(step, name, task, samples[name])],
        failures=failures,
    )


def _scores(values: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The numbers of a task with the names of their metric and filter, which the harness joins by a comma."""
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if comma and _is_number(value):
            yield metric, filter_name, float(value)


def _score_name(metric: str, filter_name: str) -> str:
    """``acc`` of the filter ``none`` as ``acc``, and ``exact_match`` of ``strict`` as ``exact_match/strict``."""
    return metric if filter_name == NO_FILTER else f"{metric}/{filter_name}"


def _standard_errors(task: Any, samples: list[Mapping[str, Any]]) -> dict[str, float]:
    """The standard error of each score that is a mean over more than one question."""
    from lm_eval.api.metrics import mean_stderr

    means = task.aggregation().means
    values: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        for name in means & set(sample["metrics"]):
            if _is_number(sample[name]):
                values.setdefault((name, sample["filter"]), []).append(float(sample[name]))
    return {
        _score_name(f"{name}_stderr", filter_name): float(mean_stderr(numbers_of_filter))
        for (name, filter_name), numbers_of_filter in values.items()
        if len(numbers_of_filter) > 1
    }


def _warn_of_spaces(name: str, scores: Mapping[str, float], samples: list[Mapping[str, Any]]) -> None:
    """Warn of a score of 0 although answers are right but for spaces around them."""
    counts: dict[str, int] = {}
    for sample in samples:
        text, answer = sample["filtered_resps"][0], sample["target"]
        if not (isinstance(text, str) and isinstance(answer, str) and text.strip() == answer.strip() != ""):
            continue
        for metric in sample["metrics"]:
            score = _score_name(metric, sample["filter"])
            if text != answer and scores.get(score) == 0:
                counts[score] = counts.get(score, 0) + 1
    for score, count in counts.items():
        log.warning(
            "task %s: %s is 0, but %d of %d answers are the right ones with spaces around them. Give the task a "
            "filter_list with remove_whitespace and take_first",
            name,
            score,
            count,
            len(samples),
        )


def _rows(step: int, name: str, task: Any, samples: list[Mapping[str, Any]]) -> Iterator[TaskRow]:
    """A row for each question; where a task has several filters, their scores stand side by side."""
    halves = 2 if MUTUAL_INFO in task.aggregation() else 1
    rows: dict[int, TaskRow] = {}
    for sample in samples:
        scores: dict[str, float | None] = {
            _score_name(metric, sample["filter"]): float(sample[metric])
            for metric in sample["metrics"]
            if _is_number(sample[metric]) and _score_name(metric, sample["filter"]) not in TASK_COLUMNS
        }
        number = int(sample["doc_id"])
        if number in rows:
            scores = {**rows[number].metrics, **scores}
        prompt, text = _prompt_and_text(sample, halves)
        rows[number] = TaskRow(
            step=step,
            task=name,
            question_id=number,
            prompt=prompt,
            generated_text=text,
            answer=str(sample["target"]),
            metrics=scores,
        )
    yield from rows.values()


def _prompt_and_text(sample: Mapping[str, Any], halves: int) -> tuple[str, str]:
    """The prompt and the text of the model; of a question with choices, the most probable one with its context.

    Args:
        halves: 2 where the requests of the choices are followed by those without context.
    """
    arguments, answers = sample["arguments"], [responses[0] for responses in sample["resps"]]
    prompt = str(arguments[0][0])
    if isinstance(answers[0], str):
        return prompt, answers[0]
    if len(answers) == 1:
        return prompt, ""
    best = max(range(len(answers) // halves), key=lambda number: answers[number][0])
    return str(arguments[best][0]), str(arguments[best][1])


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)
