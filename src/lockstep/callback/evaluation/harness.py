"""lm-evaluation-harness: finds the tasks, asks on a thread of its own, which may hang, and scores the answers."""

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.callback.evaluation.config import TasksConfig
from lockstep.callback.evaluation.scoring import ScoringGuard, TaskResults, make_results
from lockstep.errors import ConfigError, LockstepError, is_passing
from lockstep.hosts import leader_only
from lockstep.plugins import own_error_text
from lockstep.text import ModelLimits
from lockstep.types import Completion, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
            error = LockstepError(own_error_text(caught))
        if self._given_up.is_set():
            return
        if self._released:
            self._done(result, error)
        else:
            self._questions.put(error or LockstepError("the tasks have no questions. Check their files and limit."))


FEWSHOT_SEED = 1234  # the seed of the questions that are shown solved: the harness's own default


@contextlib.contextmanager
def _named(fault: str) -> Iterator[None]:
    """Say of an error of the harness, of a task's file or of its functions what it prevents, and how to mend it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, LockstepError) or is_passing(error):
            raise
        raise ConfigError(
            f"{fault}: {own_error_text(error)}. Correct the task's file or its functions, or leave it out of tasks."
        ) from error


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

    def run(self, ask: Ask, step: int, limits: ModelLimits) -> TaskResults:
        """Have the tasks answered, and score the answers."""
        from lm_eval.evaluator import evaluate

        from lockstep.callback.evaluation.language_model import EngineLM

        begin = time.monotonic()
        self.check()
        config = self._config
        try:
            loaded = self._tasks().load(list(config.names))
        except Exception:
            for name in config.names:  # the one that fails
                with _named(f"task {name} cannot be loaded"):
                    self._tasks().load([name])
            raise
        tasks: Mapping[str, Any] = loaded["tasks"]
        guard = ScoringGuard()
        for name, task in tasks.items():
            _prepare(task, config.num_fewshot)
            guard.protect(name, task)
            make = _named(f"the questions of task {name} cannot be made")
            task.build_all_requests = make(task.build_all_requests)
        lm = EngineLM(
            self._tokenizer,
            ask,
            config,
            dataclasses.replace(limits, max_seq_len=min(config.max_seq_len or limits.max_seq_len, limits.max_seq_len)),
            # The harness builds all requests before it asks for the first.
            lambda: {instance.request_type for task in tasks.values() for instance in task.instances},
        )
        # Bootstrapped standard errors would start processes of their own beside this one.
        evaluated = evaluate(
            lm,
            loaded,
            limit=config.limit,
            bootstrap_iters=0,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.apply_chat_template,
        )
        return dataclasses.replace(
            make_results(step, tasks, evaluated, guard),
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
