"""The harness on a thread of its own: it asks, the main thread of the leader answers, and it may hang or fail."""

import dataclasses
import queue
import threading
from collections.abc import Callable

from lockstep.errors import LockstepError
from lockstep.hosts import leader_only
from lockstep.types import Completion, Request


class GivenUp(Exception):
    """The round was given up while the harness waited for answers; nobody sees this but the thread."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """Requests of the harness.

    Args:
        last: Whether it will ask nothing more, so that the hosts need not wait for it any longer.
    """

    requests: list[Request]
    last: bool


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
        """The next requests of the harness; None where there are none within some seconds.

        Raises:
            Exception: What the work raised.
        """
        try:
            question = self._questions.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(question, Exception):
            raise question
        return question

    def answer(self, completions: list[Completion]) -> None:
        """Give the answers to the last question.

        Args:
            completions: The completions in the order of its requests.
        """
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
