"""Calls of tools in an answer, in the formats of chat templates."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from lockstep.text.answer import CHANNEL, FINAL, MESSAGE, channel_messages, split_answer

_TAGGED: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_OBJECT: Final = re.compile(r'\s*\{\s*"(name|parameters)"\s*:')
"""The beginning of an answer that is a call in the format of Llama 3.1."""
_FUNCTIONS: Final = "functions."
"""The namespace of gpt-oss's recipients that has the tools of a chat."""
_OPEN_HEADER: Final = re.compile(r"\bto=(?P<recipient>[^\s<]+)(?:[^<]|<\|(?:channel|constrain)\|>)*\Z")
"""The header of a message of gpt-oss to a tool where the answer ends before the message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool that a model has written; as a text ``name(argument=value)``."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        values = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in self.arguments.items())
        return f"{self.name}({', '.join(values)})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerPart:
    """A part of an answer.

    Args:
        text: What the model wrote, without the markers of its template.
        call: The call that the text is; None for another kind, and where it cannot be read.
        error: Why a call cannot be read; empty for all else.
    """

    kind: Literal["reasoning", "call", "text"]
    text: str
    call: ToolCall | None = None
    error: str = ""


def split_calls(text: str) -> list[AnswerPart]:
    """The parts of an answer in their order: its reasoning, calls of tools, and what is neither.

    Three formats of calls are read: that of Hermes and Qwen, any number of ``<tool_call>{"name": …, "arguments":
    {…}}</tool_call>``; that of Llama 3.1, an answer that is ``{"name": …, "parameters": {…}}`` alone; and that of
    gpt-oss, ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}``
    (https://github.com/openai/harmony).

    Example:
        >>> parts = lockstep.text.split_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> Wait.')
        >>> [(part.kind, str(part.call or part.text)) for part in parts]
        [('call', 'add(a=1)'), ('text', ' Wait.')]
    """
    if MESSAGE in text or CHANNEL in text:
        return list(_channel_parts(text))
    answer = split_answer(text)
    parts = [] if answer.reasoning is None else [AnswerPart(kind="reasoning", text=answer.reasoning)]
    content = answer.content
    if _OBJECT.match(content):
        return [*parts, _call(content)]
    end = 0
    for match in _TAGGED.finditer(content):
        parts += [AnswerPart(kind="text", text=content[end : match.start()])]
        cut = "" if match[2] else "a call of a tool has no end: </tool_call> is missing"
        parts += [AnswerPart(kind="call", text=match[1], error=cut) if cut else _call(match[1])]
        end = match.end()
    return [part for part in (*parts, AnswerPart(kind="text", text=content[end:])) if part.text or part.error]


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in an answer, but for its reasoning, see `split_calls`; none where it has none.

    Raises:
        ValueError: A call is cut off, or no JSON object with a name and an object of arguments.

    Example:
        >>> lockstep.text.tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1, 'b': 2})]
    """
    parts = split_calls(text)
    for part in parts:
        if part.error:
            raise ValueError(part.error)
    return [part.call for part in parts if part.call is not None]


def _channel_parts(text: str) -> Iterator[AnswerPart]:
    end = 0
    for message in channel_messages(text):
        end = message.end
        if message.recipient:
            yield _call(message.body, message.recipient)
        elif message.body:
            yield AnswerPart(kind="text" if message.channel == FINAL else "reasoning", text=message.body)
    if header := _OPEN_HEADER.search(text, end):
        error = f"a call of {header['recipient']} has no arguments: {MESSAGE} is missing"
        yield AnswerPart(kind="call", text=header[0], error=error)


def _call(text: str, recipient: str | None = None) -> AnswerPart:
    """The part of a call: an object of name and arguments, or the arguments alone of what a recipient names."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return AnswerPart(kind="call", text=text, error=f"a call of a tool is no JSON: {error}")
    if recipient is None:
        value = value if isinstance(value, dict) else {}
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        needs = "a call of a tool needs a name and an object of arguments"
    else:
        name, arguments = recipient.removeprefix(_FUNCTIONS), value
        needs = f"a call of {recipient} needs an object of arguments"
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return AnswerPart(kind="call", text=text, error=needs)
    return AnswerPart(kind="call", text=text, call=ToolCall(name=name, arguments=arguments))
