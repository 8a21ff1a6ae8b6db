"""Environments: the other side of conversations of several turns, which replies to the model and rewards it."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import draccus

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.plugins import OpenRegistry
from lockstep.report import last_number
from lockstep.text import Prompt, split_answer

type Message = Mapping[str, Any]
"""A message of a chat: ``role``, such as ``user`` or ``tool``, and ``content``, a text."""
type Tool = Callable[..., Any] | Mapping[str, Any]
"""A function with types and a docstring, or its schema as chat templates read it."""


_FUNCTIONS: Final = ("tools", "questions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of an environment to an answer.

    Args:
        messages: What the model reads before it answers again.
        reward: What is added to the reward of the conversation.
        done: Whether the conversation ends here; messages are then shown, and read by nobody.
        metrics: Figures of the conversation, whose means are logged as ``rollout/environment/NAME``.

    Example:
        >>> lockstep.training.Reply(reward=1.0, done=True).messages
        ()
    """

    messages: tuple[Message, ...] | list[Message] = ()
    reward: float | bool = 0.0
    done: bool = False
    metrics: Mapping[str, float | bool] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "Reply.")
        for name, value in {"reward": self.reward, **self.metrics}.items():
            if not math.isfinite(value):
                raise ConfigError(f"Reply: {name} is {value}; it must be finite. Correct it.")


@dataclasses.dataclass(kw_only=True)
class Environment(OpenRegistry, draccus.ChoiceRegistry):
    """An environment: ``type: retry``, or ``my_module:MyEnvironment`` for a dataclass that extends this one.

    Each conversation has a copy of its own, in a thread and an event loop of its own on one host, where a launch
    raises. One that raises, or takes too long, ends its conversation, and nothing is learned from the answers to that
    question.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(kw_only=True)
        ... class TwoTries(lockstep.training.Environment):
        ...     hint: str = "Try again."
        ...
        ...     async def reset(self, question):
        ...         self.answer = question.answer
        ...         return await super().reset(question)
        ...
        ...     async def step(self, message):
        ...         if self.answer in message["content"]:
        ...             return lockstep.training.Reply(reward=1.0, done=True)
        ...         return lockstep.training.Reply(messages=[{"role": "user", "content": self.hint}])
        ...
        >>> TwoTries(max_turns=2).hint
        'Try again.'
    """

    _COROUTINES: ClassVar[tuple[str, ...]] = ("reset", "step", "end", "close")

    max_turns: int = 8
    """The number of answers of a conversation at most. It also ends with an answer that was cut at
    ``rollout.max_new_tokens``, and where ``data.max_seq_len`` leaves no room for another one."""
    timeout_s: float = 30.0
    """Seconds that each `reset` and each `step` may take."""

    def __post_init__(self) -> None:
        check_fields(self, "environment.")
        check_at_least(self, 1, "max_turns", block="environment.")
        check_at_least(self, 0, "timeout_s", block="environment.", fix=" seconds. The default is 30.", above=True)
        for name in (*_FUNCTIONS, *self._COROUTINES):
            method, awaited = getattr(self, name), name not in _FUNCTIONS
            if inspect.iscoroutinefunction(method) != awaited or not callable(method):
                kind = f"{'no' if awaited else 'a'} coroutine function" if callable(method) else f"{method!r:.80}"
                fix = "async def" if awaited else "def"
                raise ConfigError(f"environment: {name} of {type(self).__name__} is {kind}. Write {fix} {name}.")

    def tools(self) -> Sequence[Tool]:
        """Return the functions that the chat template describes to the model, see `ToolEnvironment`; none by default.
        It is asked once, of an environment without a conversation.
        """
        return ()

    def questions(self) -> Iterable[Prompt] | None:
        """Return questions of its own, the same on every host; None, the default: those of ``data``."""
        return None

    async def reset(self, question: Prompt) -> Sequence[Message]:
        """Begin a conversation; return its first messages, by default those of the question.

        Args:
            question: A question of ``data``: ``messages`` or ``text``, ``answer``, and ``fields``, the rest of its
                record.
        """
        return question.messages or ()

    async def step(self, message: Message) -> Reply:
        """Return what follows an answer of the model.

        Args:
            message: The answer: ``{"role": "assistant", "content": ...}``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(message)")

    async def end(self) -> Reply:
        """Return the last reward and metrics of a conversation that ends before a reply is ``done``: after
        ``max_turns``, with an answer that was cut, or without room for another one; 0 by default.
        """
        return Reply()

    async def close(self) -> None:
        """End what the conversation has begun; called once, also after an error."""


@Environment.register_subclass("retry")
@dataclasses.dataclass(kw_only=True)
class Retry(Environment):
    """Asks again where the number that an answer ends in is not that of the reference answer, as the reward ``gsm8k``
    reads both.
    """

    hint: str = "That is not right. Think again."
    """The message after a wrong answer."""
    discount: float = 0.5
    """The reward of a right answer, times this for each wrong one before it."""

    async def reset(self, question: Prompt) -> Sequence[Message]:
        """See `Environment.reset`."""
        self._number, self._worth = last_number(question.answer or ""), 1.0
        if self._number is None:
            raise ValueError(f"the reference answer {question.answer!r:.80} has no number")
        return await super().reset(question)

    async def step(self, message: Message) -> Reply:
        """See `Environment.step`."""
        if last_number(split_answer(str(message["content"])).content) == self._number:
            return Reply(reward=self._worth, done=True)
        self._worth *= self.discount
        return Reply(messages=[{"role": "user", "content": self.hint}])
