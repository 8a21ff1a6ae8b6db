"""Calls of a tokenizer. It may be somebody else's, and its library panics."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import PromptError
from lockstep.text.template import PROCESS
from lockstep.text.template_date import date_options, date_seen
from lockstep.text.template_kwargs import template_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # what marks the end of the last message, as in transformers


_CALL: Final = "LOCKSTEP_CALL_"  # what stands for calls where it is looked for in the text
_LOST: Final = "it does not mention {}, which the chat has: use one that does, or leave them out"


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of the tokenizers' Rust, which is no `Exception` and would end the process, as an error of ours.

    Raises:
        PromptError: The library has panicked, as on a text that its pattern takes too long for.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise PromptError(
            f"the tokenizer's library gave up ({str(error).strip()[:200]}), as it does on a very long run of spaces or "
            "of one character. Correct the text, or remove it."
        ) from None


def token_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], **options: Any) -> Any:
    """The encoding of texts, as the tokenizer returns it: ``input_ids`` and what the options ask for.

    Raises:
        PromptError: The tokenizer cannot take a text.
    """
    with panics_as_errors():
        return tokenizer(list(texts), verbose=False, **options)


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text.

    Raises:
        PromptError: The tokenizer cannot take it.
    """
    with panics_as_errors():
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]


def chat_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """The text that the tokenizer's chat template makes of messages, as ``apply_chat_template`` of transformers.

    Args:
        tools: The schemas of the functions that the template describes; none: those of `set_tools`.
        add_generation_prompt: Whether the text ends with the beginning of an answer.
        continue_final_message: Whether the text ends with the last message, which the model goes on from.

    Raises:
        PromptError: The template has refused the messages, or needs too much time or memory; or it would leave out
            tools, or calls of them.
        Exception: What a tokenizer with a method of its own raises.
    """
    from transformers import PreTrainedTokenizerBase

    chat: Any = [dict(message) for message in messages]
    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        options: dict[str, Any] = {"add_generation_prompt": True} if add_generation_prompt else {}
        options |= {"continue_final_message": True} if continue_final_message else {}
        options |= {**date_options(tokenizer), **template_kwargs(tokenizer), **({"tools": tools} if tools else {})}
        with panics_as_errors():
            return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    template = tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None)
    if tools and not _mentions(template, "tools"):
        raise PromptError(_LOST.format("tools"))
    for change in template_message_changes().values():
        chat = change(chat)
    if continue_final_message:
        chat[-1]["content"] = f"{chat[-1]['content']}{_END}"
    variables: dict[str, Any] = {
        "messages": chat,
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    variables |= {**tokenizer.special_tokens_map, **template_kwargs(tokenizer), **({"tools": tools} if tools else {})}
    date = date_seen(tokenizer)
    marks = {f"{_CALL}{row}.": row for row, message in enumerate(chat) if message.get("tool_calls")}
    if marks and not _mentions(template, "tool_calls"):  # then it can write them within a message as JSON alone
        marked = chat.copy()
        for mark, row in marks.items():
            marked[row] = chat[row] | {"tool_calls": [mark]}
        probe = PROCESS.render(template, variables | {"messages": marked}, date) if "tojson" in template else ""
        if any(mark not in probe for mark in marks):
            raise PromptError(_LOST.format("tool_calls"))
    text = PROCESS.render(template, variables, date)
    if not continue_final_message:
        return text
    before, mark, after = text.rpartition(_END.strip())
    if not mark:
        raise PromptError("it does not write the last message as it is, so nothing can go on from it")
    return before if after.startswith(" ") else before.rstrip()  # some templates strip what they write


def _mentions(template: str, name: str) -> bool:
    """Whether a word is in a template, whose program is not parsed: what it has in no word it does not write."""
    return re.search(rf"\b{name}\b", template) is not None


def template_message_changes() -> dict[str, Callable[[Any], Any]]:
    """Return the changes that the installed transformers makes to messages before a template gets them, by name; none
    before 5.24, which leaves out keys that are null and gives the reasoning under the names that templates read.
    """
    from transformers.utils import chat_template_utils

    names = ("_normalize_chat_messages", "_alias_reasoning_fields")
    return {name: getattr(chat_template_utils, name) for name in names if hasattr(chat_template_utils, name)}


def count_appended(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return how many special tokens a tokenizer puts behind a text, such as the end of the sequence."""
    text, whole = (encode_text(tokenizer, "a", add_special_tokens=special) for special in (False, True))
    ends = [end for end in range(len(text), len(whole) + 1) if text and whole[end - len(text) : end] == text]
    return len(whole) - ends[-1] if ends else 0
