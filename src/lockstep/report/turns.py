"""The turns of a conversation: as lines that can be read, and as parts that a page can fold."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.text import AnswerPart, split_calls

type Turn = Mapping[str, Any]
"""A message of a conversation: ``role``, ``content``, the ``name`` of a tool, and of an answer what ``reward`` followed
it."""

_ANSWER: Final = "assistant"


def turn_parts(turn: Turn) -> list[AnswerPart]:
    """The parts of a turn; that of anybody else than the model has one."""
    content = turn.get("content")
    if not isinstance(content, str):  # calls of a chat that was given, in the format of OpenAI
        return [AnswerPart(kind="text", text=json.dumps(turn.get("tool_calls"), ensure_ascii=False))]
    return split_calls(content) if turn["role"] == _ANSWER else [AnswerPart(kind="text", text=content)]


def turn_lines(turns: Sequence[Turn]) -> list[str]:
    """A line ``role: text`` for each turn, of which a call of a tool is shown as ``→ name(argument=value)``.

    Example:
        >>> call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        >>> turn_lines([{"role": "assistant", "content": call}, {"role": "tool", "name": "add", "content": "3"}])
        ['assistant: → add(a=1, b=2)', 'tool add: 3']
    """
    return [f"{speaker(turn)}: {' '.join(map(_shown, turn_parts(turn)))}" for turn in turns]


def conversation_text(turns: Sequence[Turn]) -> str:
    """The lines of a conversation from the model's first answer on."""
    return "\n".join(turn_lines(answered(turns)))


def answered(turns: Sequence[Turn]) -> Sequence[Turn]:
    """The turns from the model's first answer on: what is before it is the prompt."""
    return turns[next((place for place, turn in enumerate(turns) if turn["role"] == _ANSWER), len(turns)) :]


def speaker(turn: Turn) -> str:
    """Who speaks: the role, and the name of a tool."""
    return " ".join(str(turn[key]) for key in ("role", "name") if turn.get(key))


def _shown(part: AnswerPart) -> str:
    if part.kind == "call":
        return f"→ {part.call or part.text}"
    return f"({part.text})" if part.kind == "reasoning" else part.text.strip()
