"""lm-evaluation-harness: finds the tasks, asks on a thread of its own, which may hang, and scores the answers."""

import dataclasses
import logging
import numbers
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.callback.evaluation.config import TasksConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.hosts import leader_only
from lockstep.types import Completion, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "eval"  # the beginning of the names of all scores, and of that of the table
TASK_COLUMNS = ("step", "task", "question_id", "prompt", "generated_text", "answer")
"""The columns of a row, in the order of the table; the scores of the row follow."""


class GivenUp(Exception):
    """The round was given up while the harness waited for answers; nobody sees this but the thread."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """Requests of the harness."""

    requests: list[Request]
    last: bool  # whether it will ask nothing more, so that the hosts need not wait for it any longer


type Ask = Callable[[list[Request], bool], list[Completion]]
"""Has requests answered, given whether they are the last ones; called in the thread."""


class HarnessThread[Result]:
    """Work that asks questions in between, one set at a time; on the leader alone.

    A launch in the thread raises. The thread does not keep the interpreter alive. Nothing can end work that hangs, so
    it is left behind; `alive` says so.

    Args:
        work: The work. It gets a function that has requests answered, and gives a result.
        done: Called in the thread when the work has ended after its last answers: with the result, or the error. What
            fails before that is raised by `next_question`, and what is given up is said to nobody.
    """

    def __init__(
        self, work: Callable[[Ask], Result], done: Callable[[Result | None, Exception | None], object]
    ) -> None:
        self._work, self._done = work, done
        self._questions: queue.SimpleQueue[Question | Exception] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Completion] | GivenUp] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._has_asked = self._released = False
        self._thread = threading.Thread(target=self._run, name="lockstep-harness", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the work goes on, be it that it hangs."""
        return self._thread.is_alive()

    def next_question(self, timeout_s: float) -> Question | None:
        """The next requests of the harness; None where there are none within some seconds."""
        try:
            question = self._questions.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(question, Exception):
            raise question
        return question

    def answer(self, completions: list[Completion]) -> None:
        """Give the answers to the last question."""
        self._answers.put(completions)

    def give_up(self) -> None:
        """Have the work end at its next question, or at the one whose answers it waits for."""
        self._given_up.set()
        self._answers.put(GivenUp())

    def wait(self, timeout_s: float) -> bool:
        """Wait until the work has ended; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ask(self, requests: list[Request], last: bool) -> list[Completion]:
        if self._given_up.is_set():
            raise GivenUp
        if self._released:
            raise LockstepError("the harness asked again after its last question. This is a fault of the task's.")
        self._has_asked = True
        self._questions.put(Question(requests=requests, last=last))
        answers = self._answers.get()
        if isinstance(answers, GivenUp):
            raise answers
        self._released = last
        return answers

    def _run(self) -> None:
        result: Result | None = None
        error: Exception | None = None
        try:
            with leader_only():
                result = self._work(self._ask)
                if self._has_asked and not self._released:
                    self._ask([], True)  # its last question was one that needs no model
        except Exception as caught:
            error = caught
        except BaseException as caught:  # SystemExit: a task's file is a program of the user's
            error = LockstepError(f"{type(caught).__name__}: {caught}")
        if self._given_up.is_set():
            return
        if self._released:
            self._done(result, error)
        else:
            self._questions.put(error or LockstepError("the tasks have no questions. Check their files and limit."))


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
    """

    scores: Mapping[str, Mapping[str, float]]
    rows: list[TaskRow]  # the answers in the order of the tasks and their questions
    requests: int
    truncated: int  # number of requests whose beginning was left out because they were too long
    seconds: float = 0.0

    def scalars(self, step: int) -> dict[str, float]:
        """The numbers as a tracker gets them: ``eval/TASK/METRIC``."""
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


FEWSHOT_SEED = 1234  # the seed of the questions that are shown solved: the harness's own default
NO_FILTER = "none"  # the harness's name for scores of answers as they are


class Harness:
    """The tasks of a configuration; used on the leader alone, and the only place that runs the harness."""

    def __init__(self, config: TasksConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._config, self._tokenizer = config, tokenizer
        self._manager: Any = None

    def check(self) -> None:
        """Check that the harness is installed and knows the tasks; no data set is read."""
        manager = self._tasks()
        for name in self._config.names:
            if name not in manager.task_index and not (name.endswith(".yaml") and Path(name).is_file()):
                where = "" if self._config.task_dir is None else f", nor in {self._config.task_dir}"
                raise ConfigError(
                    f"tasks.names has {name!r}, which is not a task of lm-evaluation-harness{where}, and not the path "
                    "of a task file. `lm-eval ls tasks` lists the harness's own."
                )

    def run(self, ask: Ask, step: int, max_length: int) -> TaskResults:
        """Have the tasks answered, and score the answers."""
        from lm_eval.evaluator import evaluate

        from lockstep.callback.evaluation.language_model import EngineLM

        begin = time.monotonic()
        self.check()
        config = self._config
        loaded = self._tasks().load(list(config.names))
        tasks: Mapping[str, Any] = loaded["tasks"]
        for task in tasks.values():
            _prepare(task, config.num_fewshot)
        lm = EngineLM(
            self._tokenizer,
            ask,
            config,
            min(config.max_seq_len or max_length, max_length),
            # The harness builds all requests before it asks for the first.
            lambda: {instance.request_type for task in tasks.values() for instance in task.instances},
        )
        # Bootstrapped standard errors would start processes of their own beside this one.
        found = evaluate(
            lm,
            loaded,
            limit=config.limit,
            bootstrap_iters=0,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.apply_chat_template,
        )
        samples: Mapping[str, list[Mapping[str, Any]]] = found["samples"]
        scores = {name: dict(_scores(values)) for name, values in found["results"].items()}
        for name, task in tasks.items():
            scores[name] |= _standard_errors(task, samples[name])
        return TaskResults(
            scores={name: values for name, values in scores.items() if values},
            rows=[row for name in tasks for row in _rows(step, name, samples[name])],
            requests=lm.requests,
            truncated=lm.truncated,
            seconds=lm.answered_at - begin,
        )

    def _tasks(self) -> Any:
        """The harness's index of tasks: only one's own where these are all that is asked for, which is quick."""
        if self._manager is not None:
            return self._manager
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ConfigError(
                f"tasks need lm-evaluation-harness, which cannot be imported ({error}). Install it on the leader with "
                "pip install 'jax-lockstep[eval]', or remove tasks."
            ) from error
        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        own = self._config.task_dir
        if own is not None and not Path(own).is_dir():
            raise ConfigError(f"tasks.task_dir is {own!r}, which is not a directory. Correct the path, or remove it.")
        manager = TaskManager(include_path=own, include_defaults=False)
        files = [name for name in self._config.names if name.endswith(".yaml") and Path(name).is_file()]
        if not {*self._config.names} <= {*manager.task_index, *files}:
            manager = TaskManager(include_path=own)
        self._manager = manager
        return manager


def _prepare(task: Any, num_fewshot: int | None) -> None:
    """Set a task up as the harness's own command does before it is evaluated."""
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    elif num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


def _scores(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a task, ``acc,none`` as ``acc`` and ``exact_match,strict`` as ``exact_match/strict``."""
    for key, value in values.items():
        name, comma, filter_name = key.partition(",")
        if comma and _is_number(value):
            yield _score_name(name, filter_name), float(value)


def _score_name(metric: str, filter_name: str) -> str:
    return metric if filter_name == NO_FILTER else f"{metric}/{filter_name}"


def _standard_errors(task: Any, samples: list[Mapping[str, Any]]) -> dict[str, float]:
    """The standard error of each score that is a mean over more than one question."""
    from lm_eval.api.metrics import mean, mean_stderr

    means = {name for name, function in task.aggregation().items() if function is mean}
    values: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        for name in means & set(sample["metrics"]):
            if _is_number(sample[name]):
                values.setdefault((name, sample["filter"]), []).append(float(sample[name]))
    return {
        _score_name(f"{name}_stderr", filter_name): float(mean_stderr(each))
        for (name, filter_name), each in values.items()
        if len(each) > 1
    }


def _rows(step: int, task: str, samples: list[Mapping[str, Any]]) -> Iterator[TaskRow]:
    """A row for each question; where a task has several filters, their scores stand side by side."""
    rows: dict[int, TaskRow] = {}
    for sample in samples:
        scores: dict[str, float | None] = {
            _score_name(name, sample["filter"]): float(sample[name])
            for name in sample["metrics"]
            if _is_number(sample[name]) and _score_name(name, sample["filter"]) not in TASK_COLUMNS
        }
        number = int(sample["doc_id"])
        if number in rows:
            scores = {**rows[number].metrics, **scores}
        rows[number] = TaskRow(
            step=step,
            task=task,
            question_id=number,
            prompt=str(sample["arguments"][0][0]),
            generated_text=_generated_text(sample),
            answer=str(sample["target"]),
            metrics=scores,
        )
    yield from rows.values()


def _generated_text(sample: Mapping[str, Any]) -> str:
    """The text of the model, or the choice that it thinks most probable."""
    answers = [each[0] for each in sample["resps"]]
    if isinstance(answers[0], str):
        return answers[0]
    if len(answers) > 1:
        best = max(range(len(answers)), key=lambda number: answers[number][0])
        return str(sample["arguments"][best][1])
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)
