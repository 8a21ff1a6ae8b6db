"""Chats as text: what the tokenizer's template makes of their messages, and where the answers in it are."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import PromptError
from lockstep.json_text import lone_surrogate, without_nulls
from lockstep.text import Prompt, text_message
from lockstep.text.template_kwargs import stored_tools
from lockstep.text.tokenize import chat_text
from lockstep.training.data.records import BadRow, Record, field

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat as text.

    Args:
        text: All of it.
        answers: Where each answer that is a target begins and ends; the last one ends with the text.
    """

    text: str
    answers: Sequence[tuple[int, int]]


def messages_of(record: Record, name: str = "messages") -> list[Any]:
    """Return the messages of a chat as their author wrote them, without the nulls of a column's other messages."""
    messages: list[Any] = field(record, name, list)
    try:
        return list(map(text_message, messages))
    except PromptError:  # it is said of the whole chat
        return [without_nulls(message) for message in messages]


def chat_of(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], side: str = "", tools: object = None
) -> Chat:
    """Return the text of a chat, of which the last answer is the target.

    Args:
        side: What a message begins with.
        tools: The tools of its record, as `stored_tools` takes them.
    """
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    if roles and roles[-1] is None:
        last = sorted(messages[-1]) if isinstance(messages[-1], Mapping) else f"{messages[-1]!r:.80}"
        raise BadRow(f"{side}has {last} as its last message, without a 'role'. Write messages with role and content.")
    if len(messages) < 2 or roles[-1] != "assistant":
        raise BadRow(
            f"{side}has {len(messages)} messages and ends with role {roles[-1] if roles else None!r}; it must have a "
            "prompt and end with the assistant's answer. Correct it or remove it."
        )
    if not isinstance(messages[-1].get("content"), str) and not messages[-1].get("tool_calls"):
        raise BadRow(f"{side}has an answer without a text as its 'content'. Correct it or remove it.")
    if messages[-1].get("weight") == 0:
        raise BadRow(f"{side}has an answer of weight 0 last, which is not to be trained. Remove it, or its weight.")
    before = [dict(message) for message in make_prompt(messages=tuple(messages[:-1])).messages or ()]
    try:
        schemas = stored_tools(tools)
        prompt = chat_text(tokenizer, before, tools=schemas, add_generation_prompt=True)
        text = chat_text(tokenizer, [*before, messages[-1]], tools=schemas)
    except Exception as error:  # the template is a program of the tokenizer's: it may raise anything
        raise BadRow(f"{side}has messages that the tokenizer's chat template refuses: {error}") from error
    assert isinstance(prompt, str) and isinstance(text, str)
    if broken := lone_surrogate(text):
        raise BadRow(f"{side}has {broken} in its messages. Correct it or remove it.")
    if not text.startswith(prompt):
        raise BadRow(
            f"{side}has a chat whose text does not begin with that of its prompt, so it is not known where the answer "
            "begins. Use a chat template whose generation prompt begins an assistant's message."
        )
    return Chat(text, [(len(prompt), len(text))])


def whole_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], tools: object = None
) -> Chat:
    """Return the text of a chat, of which every answer is a target: each as if it were the last, at the same place.

    Answers with a ``weight`` of 0 are none, as in OpenAI's format.
    """
    whole = chat_of(tokenizer, messages, tools=tools)
    answers: list[tuple[int, int]] = []
    for number, message in enumerate(messages[:-1], 1):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        part = chat_of(tokenizer, messages[:number], tools=tools)
        if not whole.text.startswith(part.text):
            raise BadRow(
                f"has a chat whose text up to message {number} is another one where messages follow, so it is not "
                "known where this answer is. Use data.train_on: last, or a chat template that writes a message the "
                "same whatever follows."
            )
        answers += part.answers
    return Chat(whole.text, [*answers, *whole.answers])


def make_prompt(**values: Any) -> Prompt:
    """Return a prompt of a record."""
    try:
        return Prompt(id=0, **values)
    except PromptError as error:
        raise BadRow(f"has a prompt that cannot be used: {str(error).removeprefix('prompt 0 ')}") from error
