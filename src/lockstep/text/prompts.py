"""Prompts: reading them from a list or a file, and turning them into token ids."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import PromptError
from lockstep.json_text import lone_surrogate, without_nulls
from lockstep.limits import PROMPT_LINE_BYTES
from lockstep.printable import get_logger
from lockstep.text.limits import LengthLimit, ModelLimits, unknown_token
from lockstep.text.prompt_files import TABLES, prompt_items
from lockstep.text.template_kwargs import stored_tools
from lockstep.text.tokenize import chat_text, count_appended, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

PromptFormat = Literal["chat", "text"]

type PromptSource = str | Sequence[str | Mapping[str, Any]]
"""A path or URL of a file (`prompt_items`), or a list of texts and mappings."""

INLINE_KEYS = ("prompt", "messages", "answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question to the model: a text, or the messages of a chat.

    Args:
        id: The prompt's number, from 0 in the order of the source.
        text: The text that the model continues; None for a chat.
        messages: The messages of a chat, ``{"role": …, "content": …}`` each, as `text_message` makes them; None for a
            text.
        answer: The reference answer, which metrics compare with; None where there is none.
        fields: The further fields of its line, such as an id of the user's.
        place: The file and line that it is from, for messages; empty where that is not known.

    Raises:
        PromptError: Neither or both of text and messages are given, one of them is empty, or a message is without role
            and content.

    Example:
        >>> lockstep.text.Prompt(id=0, text="2 + 2 =", answer="4").shown
        '2 + 2 ='
    """

    id: int
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    answer: str | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    place: str = dataclasses.field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise PromptError(
                f"prompt {self.id} needs a text or chat messages, exactly one of the two. Where a file has both, let "
                "prompt_field or messages_field name a field that it does not have."
            )
        if self.text is not None and not self.text.strip():
            raise PromptError(f"prompt {self.id} is empty ({self.text!r}). Remove it or give it text.")
        if self.messages is not None:
            if not self.messages:
                raise PromptError(f"prompt {self.id} has an empty list of messages. Remove it or add a user message.")
            try:
                object.__setattr__(self, "messages", tuple(map(text_message, self.messages)))
            except PromptError as error:
                raise PromptError(f"prompt {self.id} has {error}") from None
        if broken := lone_surrogate(self.shown):
            raise PromptError(f"prompt {self.id} has {broken}, which is no character. Correct it or remove it.")

    @property
    def shown(self) -> str:
        """The prompt as one text for tables: the text, or a line ``role: content`` per message."""
        if self.text is not None:
            return self.text
        assert self.messages is not None
        return "\n".join(f"{message['role']}: {_shown_content(message)}" for message in self.messages)


def text_message(message: object) -> Mapping[str, Any]:
    """A message of a chat whose content is a text, or null beside calls of tools; without other nulls.

    Text parts (``[{"type": "text", "text": …}]``, OpenAI) become one text with a line per part, as vLLM makes them.

    Raises:
        PromptError: It is no message, or has a part that is no text; the text goes on after its place.
    """
    if isinstance(message, Mapping) and isinstance(message.get("role"), str):
        content, kept = message.get("content"), dict(without_nulls(message))
        if isinstance(content, str):
            if broken := lone_surrogate(content):
                raise PromptError(f"a message with {broken}, which is no character. Correct it or remove it.")
            return kept
        if content is None and message.get("tool_calls"):
            return {name: kept.get(name) for name in message if name in kept or name == "content"}
        if isinstance(content, Sequence) and content:
            parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
            texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
            if len(texts) == len(content):
                return {**kept, "content": "\n".join(texts)}
            raise PromptError(f"a message with a part that is no text: {content!r:.200}. Only texts can be asked.")
    raise PromptError(f"the message {message!r:.200}; a message needs the texts 'role' and 'content'.")


def _shown_content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return json.dumps(message["tool_calls"], ensure_ascii=False) if content is None else content


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFields:
    """The names of the fields of a ``.jsonl`` line, and the format of texts.

    Args:
        format: ``chat``: a text is the user's message of a chat. ``text``, or None: the model goes on from it; with
            None `warn_of_texts` says so where the tokenizer has a chat template.
    """

    prompt: str = "prompt"
    messages: str = "messages"
    answer: str = "answer"
    format: PromptFormat | None = None


def read_prompts(
    source: PromptSource, fields: PromptFields | None = None, max_line_bytes: int = PROMPT_LINE_BYTES
) -> list[Prompt]:
    """Read prompts from a list or a file; they are numbered from 0.

    Args:
        source: A list whose items are texts, ``{"prompt": …, "answer": …}`` or ``{"messages": […], "answer": …}``
            (answers are optional); or the path or URL (``gs://…``, through fsspec) of a ``.txt`` file with one prompt
            per line, a ``.jsonl`` file with such an item per line, or a ``.csv``, ``.tsv`` or ``.parquet`` file with
            one per row. Empty lines are skipped, an empty answer of a ``.csv`` or ``.tsv`` is none, and other fields
            of a line or row are those of the prompt.
        fields: The names of the fields in a ``.jsonl`` file, and the format; None: those of `PromptFields`.

    Raises:
        PromptError: There are no prompts, a file or a line cannot be read, or a prompt is empty.
    """
    return list(iter_prompts(source, fields, max_line_bytes))


def iter_prompts(
    source: PromptSource, fields: PromptFields | None = None, max_line_bytes: int = PROMPT_LINE_BYTES
) -> Iterator[Prompt]:
    """Read prompts one by one, so that a file of any length takes the memory of a line.

    Yields:
        The prompts, numbered from 0.
    """
    items: Iterable[tuple[str, object]]
    fields = fields or PromptFields()
    if isinstance(source, str):
        items, name, strict = prompt_items(source, max_line_bytes), source, False
    else:
        items = ((f"prompts[{index}]", item) for index, item in enumerate(source))
        name, fields, strict = "prompts", PromptFields(format=fields.format), True
    index = -1
    for index, (place, item) in enumerate(items):
        if isinstance(item, Mapping) and item.get(fields.answer) == "" and name.endswith(TABLES):
            item = {**item, fields.answer: None}  # such a file has no other way to leave it out
        try:
            prompt = _parse(index, item, fields, strict=strict)
        except PromptError as error:
            raise PromptError(f"{place}: {error}") from None
        yield prompt if strict else dataclasses.replace(prompt, place=place)
    if index < 0:
        raise PromptError(f"{name} holds no prompts; at least 1 is needed. Add one, or disable the evaluation.")


def encode(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Iterable[Prompt],
    *,
    max_seq_len: int | None = None,
    max_new_tokens: int = 0,
    limits: ModelLimits | None = None,
) -> list[tuple[int, ...]]:
    """Turn prompts into token ids, chats through the tokenizer's chat template.

    Args:
        prompts: The prompts. Texts get the tokenizer's special tokens, but for those behind a text, after which there
            would be nothing to say; chats get the start of an assistant's turn.
        max_seq_len: The number of tokens of prompt and completion together at most; None: it is not checked.
        max_new_tokens: The number of tokens of ``max_seq_len`` that are left for the completion.
        limits: Those of the model; None: they are not checked.

    Raises:
        PromptError: A prompt is too long, has no tokens or one that the model does not have, or it is a chat and the
            tokenizer has no chat template.
    """
    encoded = []
    of_model = None if limits is None else limits.max_seq_len
    limit = LengthLimit(max_seq_len=max_seq_len, of_model=of_model, max_new_tokens=max_new_tokens)
    for prompt in prompts:
        parts = (prompt.text or "", *(prompt.messages or ()))
        limit.check_characters(_named(prompt), sum(len(str(part)) for part in parts))
        try:
            tokens = _encode_one(tokenizer, prompt)
        except PromptError as error:
            raise PromptError(f"prompt {prompt.id}: {str(error).removeprefix(f'prompt {prompt.id}: ')}") from error
        if not tokens:
            raise PromptError(f"{_named(prompt)} ({prompt.shown!r}) has 0 tokens; at least 1 is needed. Change it.")
        limit.check(_named(prompt), len(tokens))
        if limits is not None and (unknown := unknown_token(tokenizer, tokens, limits.rows)):
            raise PromptError(f"{_named(prompt)} {unknown}")
        encoded.append(tokens)
    return encoded


def _named(prompt: Prompt) -> str:
    """A prompt's number, and its place where that is known."""
    return f"prompt {prompt.id} ({prompt.place})" if prompt.place else f"prompt {prompt.id}"


def warn_of_texts(tokenizer: "PreTrainedTokenizerBase", prompts: Iterable[Prompt], fields: PromptFields) -> None:
    """Warn, once in a process, where a model for chats is given texts alone and nothing says that it is meant."""
    if fields.format is None and tokenizer.chat_template and all(prompt.messages is None for prompt in prompts):
        _warn_of_texts(str(tokenizer.name_or_path))


@functools.cache
def _warn_of_texts(tokenizer: str) -> None:
    log.warning(
        "the tokenizer %r has a chat template and every prompt is a plain text, from which the model goes on as from a "
        "document. Set prompt_format: chat to ask each as a user's message, or prompt_format: text if it is meant.",
        tokenizer,
    )


@functools.cache
def _warn_of_two_beginnings(beginning: str) -> None:
    log.warning(
        "a prompt begins with %s, and the tokenizer puts another before it, which the model has not seen in training. "
        "Leave it out of the text, or give messages in the place of a chat that a template has written.",
        beginning,
    )


def _encode_one(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt) -> tuple[int, ...]:
    if prompt.text is not None:
        tokens = tuple(encode_text(tokenizer, prompt.text))
        tokens = tokens[: len(tokens) - count_appended(tokenizer)]
        if tokens[:2] == (getattr(tokenizer, "bos_token_id", None),) * 2:
            _warn_of_two_beginnings(str(tokenizer.bos_token))
        return tokens
    assert prompt.messages is not None
    if not tokenizer.chat_template:
        raise PromptError(
            f"prompt {prompt.id} is a chat, but the tokenizer {str(tokenizer.name_or_path)!r} has no chat template. "
            "Use a tokenizer with one (chat_template.jinja beside tokenizer.json, with the text of chat_template.json "
            "where a processor has that), or write the prompt as plain text."
        )
    try:
        text = chat_text(
            tokenizer, prompt.messages, tools=stored_tools(prompt.fields.get("tools")), add_generation_prompt=True
        )
    except Exception as error:  # the template is a program of the tokenizer's: it may raise anything
        raise PromptError(f"prompt {prompt.id}: the tokenizer's chat template refused its messages: {error}") from error
    return tuple(encode_text(tokenizer, text, add_special_tokens=False))


def _parse(index: int, item: object, fields: PromptFields, *, strict: bool) -> Prompt:
    if isinstance(item, str):
        return _formatted(index, item, None, {}, fields)
    if not isinstance(item, Mapping):
        raise PromptError(f"{item!r} is not a prompt. Write a text, {{prompt, answer}} or {{messages, answer}}.")
    if strict and (unknown := [key for key in item if key not in INLINE_KEYS]):
        raise PromptError(f"unknown field {unknown[0]!r}; a prompt has {', '.join(INLINE_KEYS)}. Quote a text.")
    text, messages, answer = item.get(fields.prompt), item.get(fields.messages), item.get(fields.answer)
    named = fields.messages
    if messages is None and isinstance(text, Sequence) and not isinstance(text, str):
        text, messages, named = None, text, fields.prompt  # as TRL names the messages of a prompt
    if text is None and messages is None:
        raise PromptError(
            f"has neither {fields.prompt!r} nor {fields.messages!r} (its fields: "
            f"{', '.join(map(str, item)) or 'none'}). Set prompt_field, or messages_field for a chat, to one of them."
        )
    if text is not None and not isinstance(text, str):
        raise PromptError(f"{fields.prompt!r} is {text!r}; it must be a text, or a list of messages.")
    if isinstance(answer, float) and answer.is_integer():  # as a column of whole numbers has of which one is missing
        answer = int(answer)
    if type(answer) is int or (isinstance(answer, float) and math.isfinite(answer)):
        answer = str(answer)
    if answer is not None and not isinstance(answer, str):
        raise PromptError(
            f"{fields.answer!r} is {answer!r}; it must be a text or a finite number. Put it in quotes, or write null "
            "where there is none."
        )
    if messages is not None and (
        not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise PromptError(f"{named!r} is {messages!r}; it must be a list of {{role, content}}.")
    further = {str(key): item[key] for key in item if key not in (fields.prompt, fields.messages, fields.answer)}
    if text is not None and messages is None:
        return _formatted(index, text, answer, further, fields)
    return Prompt(
        id=index, text=text, messages=None if messages is None else tuple(messages), answer=answer, fields=further
    )


def _formatted(index: int, text: str, answer: str | None, further: Mapping[str, Any], fields: PromptFields) -> Prompt:
    if fields.format == "chat" and text.strip():
        return Prompt(id=index, messages=({"role": "user", "content": text},), answer=answer, fields=further)
    return Prompt(id=index, text=text, answer=answer, fields=further)
