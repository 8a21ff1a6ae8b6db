"""Tools of environments: functions that the model calls in the format of its chat template."""

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from lockstep.text import split_answer
from lockstep.training.rl.environment import Environment, Message, Reply

_TAGGED: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_OBJECT: Final = re.compile(r'\s*\{\s*"(name|parameters)"\s*:')
"""The beginning of an answer that is a call in the format of Llama 3.1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool that a model has written."""

    name: str
    arguments: Mapping[str, Any]


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in an answer, but for its reasoning; none where it has none.

    Two formats are read: that of Hermes and Qwen, any number of ``<tool_call>{"name": …, "arguments":
    {…}}</tool_call>``, and that of Llama 3.1, an answer that is ``{"name": …, "parameters": {…}}`` alone.

    Raises:
        ValueError: A call is cut off, or no JSON object with a name and an object of arguments.

    Example:
        >>> from lockstep.training.rl import tool_calls
        >>> tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1, 'b': 2})]
    """
    content = split_answer(text).content
    if _OBJECT.match(content):
        return [_call(content)]
    calls = []
    for match in _TAGGED.finditer(content):
        if not match[2]:
            raise ValueError("a call of a tool has no end: </tool_call> is missing")
        calls.append(_call(match[1]))
    return calls


def _call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a call of a tool is no JSON: {error}") from error
    arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call["name"] if "name" in call else None, str):
        raise ValueError("a call of a tool needs a name and an object of arguments")
    return ToolCall(name=call["name"], arguments=arguments)


@dataclasses.dataclass(kw_only=True)
class ToolEnvironment(Environment):
    """An environment in which the model calls functions, and is rewarded for the answer that calls none.

    The chat template describes the functions that `tools` returns. What one returns or raises is the next message, of
    the role ``tool``; a call that cannot be read, or of an unknown tool, is answered with what is wrong.

    Example:
        >>> import dataclasses
        >>> def add(a: int, b: int):
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: The first number.
        ...         b: The second number.
        ...     '''
        ...     return a + b
        >>> @dataclasses.dataclass(kw_only=True)
        ... class Sums(lockstep.training.ToolEnvironment):
        ...     def tools(self):
        ...         return [add]
        ...
        ...     async def reset(self, question):
        ...         self.answer = question.answer
        ...         return await super().reset(question)
        ...
        ...     async def score(self, answer):
        ...         return float(self.answer in answer)
        >>> [tool.__name__ for tool in Sums().tools()]
        ['add']
    """

    async def score(self, answer: str) -> float:
        """Return the reward of the answer that calls no tool, with which the conversation ends."""
        raise NotImplementedError(f"{type(self).__name__} has no score(answer)")

    async def step(self, message: Message) -> Reply:
        """See `Environment.step`."""
        text = str(message["content"])
        try:
            calls = tool_calls(text)
        except ValueError as error:
            return Reply(messages=[{"role": "tool", "content": f"error: {error}"}])
        if not calls:
            return Reply(reward=await self.score(text), done=True)
        return Reply(messages=[await self._result(call) for call in calls])

    async def _result(self, call: ToolCall) -> Message:
        functions = {function.__name__: function for function in self.tools()}
        try:
            if call.name not in functions:
                raise LookupError(f"there is no tool {call.name!r}, only {', '.join(functions)}")
            result = functions[call.name](**call.arguments)
            if inspect.isawaitable(result):
                result = await result
            content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # the model reads it, and may do better
            content = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "name": call.name, "content": content}
