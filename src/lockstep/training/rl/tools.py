"""Tools of environments: functions that the model calls in the format of its chat template."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lockstep.printable import error_text
from lockstep.text import ToolCall, tool_calls
from lockstep.training.rl.environment import Environment, Message, Reply


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

    _COROUTINES: ClassVar[tuple[str, ...]] = (*Environment._COROUTINES, "score")

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the functions that the model may call; none by default."""
        return ()

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
        tools = self.tools()
        if not all(map(callable, tools)):
            raise TypeError(f"tools() of {type(self).__name__} returned {tools!r:.200}, which are not functions")
        functions = {function.__name__: function for function in tools}
        try:
            if call.name not in functions:
                raise LookupError(f"there is no tool {call.name!r}, only {', '.join(functions)}")
            result = functions[call.name](**call.arguments)
            if inspect.isawaitable(result):
                result = await result
            if isinstance(result, bytes):
                result = result.decode(errors="replace")
            content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
            content = content.encode(errors="replace").decode()  # half a surrogate pair, of some page, is no character
        except (Exception, SystemExit) as error:  # the model reads it, and may do better
            content = f"error: {error_text(error)}"
        return {"role": "tool", "name": call.name, "content": content}


def _plain(value: Any) -> Any:
    """A value of a result that JSON does not have: an array or a number of NumPy, a dataclass, else its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
