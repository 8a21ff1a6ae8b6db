"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv), in this process or at a server."""

import dataclasses
import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.plugins import load_object
from lockstep.text import Prompt, split_answer
from lockstep.training.rl.environment import Environment, Message, Reply


@Environment.register_subclass("openenv")
@dataclasses.dataclass(kw_only=True)
class OpenEnvEnvironment(Environment):
    """An environment of OpenEnv 0.3 (extra ``openenv``): each answer is an action, each observation a message.

    The first observation follows the question in the user's message; the reward is the sum of those of observations. A
    conversation has an instance of its own, or a session of its own at the server.
    """

    environment: str
    """Its class, ``module:Class``, or the URL of its server, which has to serve as many sessions as a rollout has
    conversations."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the class, or of the client of the server."""
    action: str
    """The field of an action that has the text of an answer, without its reasoning."""
    action_class: str | None = None
    """The class of actions, ``module:Class``; null: that in the annotation of ``step``; a server needs none."""
    observation: str | None = None
    """The field of an observation that the model reads; null: all of it, as JSON."""
    reset_fields: tuple[str, ...] = ()
    """Fields of a question's record that ``reset`` takes; ``seed`` is the number of the question unless it is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._is_remote and self.action_class is not None:
            raise ConfigError(
                f"environment.action_class is {self.action_class}, and environment.environment is a URL, whose server "
                "makes the actions. Remove it."
            )

    @property
    def _is_remote(self) -> bool:
        return "://" in self.environment

    async def reset(self, question: Prompt) -> Sequence[Message]:
        """See `Environment.reset`."""
        fields = {"seed": question.id, **{name: question.fields[name] for name in self.reset_fields}}
        if self._is_remote:
            self._instance = _client(self.environment, self.arguments)
            await self._instance.connect()
            result = await self._instance.reset(**fields)
            observation = result.observation
        else:
            self._instance = load_object(self.environment, "environment.environment")(**self.arguments)
            known = inspect.signature(self._instance.reset).parameters
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
            fields = {name: value for name, value in fields.items() if takes_all or name in known}
            observation = await self._instance.reset_async(**fields) if takes_all else self._instance.reset(**fields)
        return _after(question.messages or (), self._text(observation))

    async def step(self, message: Message) -> Reply:
        """See `Environment.step`."""
        text = split_answer(str(message["content"])).content
        if self._is_remote:
            result = await self._instance.step({self.action: text})
            observation, metrics = result.observation, {}
        else:
            result = observation = await self._instance.step_async(self._actions()(**{self.action: text}))
            metrics = _scores(self._instance) if observation.done else {}
        shown = self._text(observation)
        return Reply(
            messages=[{"role": "user", "content": shown}] if shown else (),
            reward=float(result.reward or 0.0),
            done=bool(result.done),
            metrics=metrics,
        )

    async def close(self) -> None:
        """See `Environment.close`."""
        if hasattr(self, "_instance"):
            closing = self._instance.close()
            if inspect.isawaitable(closing):
                await closing

    def _actions(self) -> Any:
        """The class of the actions."""
        if self.action_class is not None:
            return load_object(self.action_class, "environment.action_class")
        annotated = typing.get_type_hints(type(self._instance).step).get("action")
        if not isinstance(annotated, type) or self.action not in getattr(annotated, "model_fields", ()):
            raise ConfigError(
                f"environment.action is {self.action!r}, and {self.environment} annotates the action of its step with "
                f"{annotated}, which has no such field. Correct it, or set environment.action_class."
            )
        return annotated

    def _text(self, observation: Any) -> str:
        """The part of an observation that the model reads."""
        fields: Mapping[str, Any] = observation if isinstance(observation, Mapping) else observation.model_dump()
        if self.observation is None:
            rest = {name: value for name, value in fields.items() if name not in ("done", "reward", "metadata")}
            return json.dumps(rest, ensure_ascii=False, default=str)
        if self.observation not in fields:
            raise ConfigError(
                f"environment.observation is {self.observation!r}, and an observation has {', '.join(fields)}. Use one "
                "of these, or null."
            )
        value = fields[self.observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _client(url: str, arguments: Mapping[str, Any]) -> Any:
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise ConfigError(
            f"environment.type is openenv, whose client is not installed ({error}). Install 'jax-lockstep[openenv]' on "
            "every host."
        ) from error
    return GenericEnvClient(base_url=url, **arguments)


def _scores(environment: Any) -> dict[str, float]:
    """The last scores of the rubrics of an environment, by name; none where it has no rubric."""
    rubric = getattr(environment, "rubric", None)
    named = [] if rubric is None else list(rubric.named_rubrics())
    return {name: float(part.last_score) for name, part in named if part.last_score is not None}


def _after(messages: Sequence[Message], text: str) -> Sequence[Message]:
    """Messages with a text after them: in the last one where it is the user's, for turns of templates alternate."""
    if not text:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{text}"}]
