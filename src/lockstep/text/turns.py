"""The tokens between two answers of a conversation: what was said meanwhile, as the chat template writes it."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import PromptError
from lockstep.text.tokenize import chat_text, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER: Final = "LOCKSTEP_ANSWER_OF_THE_MODEL"  # what stands for the answer while the template writes the rest


def following_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    before: Sequence[Mapping[str, Any]],
    answer: Sequence[int],
    after: Sequence[Mapping[str, Any]],
) -> tuple[int, ...]:
    """Return the tokens from the end of an answer to the beginning of the next one.

    What was said before keeps its tokens, sampled ones too: nothing is tokenised twice.

    Args:
        before: The messages before the answer; none where the conversation began with a text, which no template writes:
            the contents of further messages are then appended as they are.
        answer: The token ids of the answer, which may have the end of its turn.
        after: The messages that follow it.

    Raises:
        PromptError: The chat template or the tokenizer cannot take the messages.

    Example:
        >>> from lockstep.text import following_tokens
        >>> reply = {"role": "user", "content": " and three"}
        >>> tokenizer.decode(following_tokens(tokenizer, [], [], [reply])).strip()
        'and three'
    """
    if not before:
        contents = "".join(str(message["content"]) for message in after)
        return tuple(encode_text(tokenizer, contents, add_special_tokens=False))
    text = _text_after_answer(tokenizer, before, after)
    if text is None:
        raise PromptError("the chat template does not write an assistant's message as it is, so nothing can follow it.")
    tokens = encode_text(tokenizer, text, add_special_tokens=False)
    ended = bool(answer) and tokens[:1] == [answer[-1]]
    return tuple(tokens[ended:])


def _text_after_answer(
    tokenizer: "PreTrainedTokenizerBase", before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> str | None:
    """Text that the chat template writes after an answer; None where it does not write the answer as it is.

    A template may refuse the markers of an earlier answer, and the result of a tool behind a message that calls none
    (gpt-oss's refuses both). Then earlier turns are left out, and what stands for the answer is a call.
    """
    answer: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
    try:
        text = chat_text(tokenizer, [*before, answer, *after], add_generation_prompt=True)
    except PromptError:
        if after[0]["role"] == "tool":
            call = {"name": after[0].get("name", "tool"), "arguments": _ANSWER}
            answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        opening = itertools.takewhile(lambda message: message["role"] != "assistant", before)
        text = chat_text(tokenizer, [*opening, answer, *after], add_generation_prompt=True)
        text = text.replace(json.dumps(_ANSWER), _ANSWER)  # arguments may be written as JSON
    _, mark, text = text.partition(_ANSWER)
    return text if mark else None
