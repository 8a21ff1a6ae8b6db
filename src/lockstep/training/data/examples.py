"""From records to tokens: documents, prompts with completions, chats and preference pairs."""

import bisect
import dataclasses
import hashlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.errors import ConfigError, PromptError
from lockstep.json_text import lone_surrogate, without_nulls
from lockstep.plugins import load_object
from lockstep.text import Prompt, count_appended, text_message
from lockstep.text.tokenize import chat_text, token_ids
from lockstep.training.data.records import BadRow, Record, field

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """The tokens of one sequence.

    Args:
        n_prompt: The number of its first tokens that are not targets.
        tokens: Token ids. A later one that is no target is stored as its complement ``~id``, which is negative.
        reference: The log-probability of the targets under a reference model; None where the records do not have it.
    """

    n_prompt: int
    tokens: Sequence[int] | np.ndarray
    reference: float | None = None


type Example = tuple[TokenSequence, ...]
"""One sequence; of a pair the chosen and the rejected one."""


@dataclasses.dataclass(frozen=True)
class _Chat:
    """A chat as text.

    Args:
        text: All of it.
        answers: Where each answer that is a target begins and ends; the last one ends with the text.
    """

    text: str
    answers: Sequence[tuple[int, int]]


type Tokenize = Callable[["PreTrainedTokenizerBase", Sequence[Record]], list[Example | BadRow]]
"""Turns records into tokens, all in one call of the tokenizer, which uses every core: each example, or what is wrong.

Prompts have the tokens that `lockstep.text.encode` gives them, so that training and sampling see the same ones; only
where a token holds the end of a chat's prompt and the first character of its answer, it belongs to the answer.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFormat:
    """The format of a source's records, and their tokenisation.

    Args:
        name: Its name in `FORMATS`; of a user's own, ``module:name`` and a digest of that module.
        fields: The fields of a record that it reads; files with columns leave out the others.
        tokenize: Turns records into tokens.
        documents: Whether examples are documents, which may be cut and go on in another row.
        chats: Whether the tokenizer must have a chat template.
        pairs: Whether an example is a chosen and a rejected sequence.
        reference: Whether they have their log-probabilities under a reference model.

    Example:
        >>> from lockstep.training import DataFormat
        >>> def squad(record):
        ...     return {"prompt": record["question"], "completion": record["answers"][0]}
        >>> FORMAT = DataFormat.find("prompt_completion").converted(squad, fields=("question", "answers"))
        >>> FORMAT.fields
        ('question', 'answers')
    """

    name: str = ""
    fields: tuple[str, ...]
    tokenize: Tokenize
    documents: bool = False
    chats: bool = False
    pairs: bool = False
    reference: bool = False

    @classmethod
    def find(cls, name: str, known: Sequence[str] = ()) -> "DataFormat":
        """Return a format by name; a module of the user's is imported.

        Args:
            name: One of `FORMATS`, or ``module:name`` of a `DataFormat`.
            known: The names of those that can be used here; empty: all.

        Raises:
            ConfigError: There is no such format, or no such module.
        """
        if name in (known or FORMATS):
            return FORMATS[name]
        if ":" not in name:
            raise ConfigError(
                f"data.format is {name!r}; it must be {', '.join(known or FORMATS)}, or module:name of your own."
            )
        found: DataFormat = load_object(name, "data.format", cls)
        # What its module says is a part of the cache's key; what that imports is not.
        source = inspect.getsource(sys.modules[name.partition(":")[0]])
        digest = hashlib.sha256(source.encode()).hexdigest()
        return dataclasses.replace(found, name=f"{name} {digest[:16]}")

    def converted(self, convert: Callable[[Record], Record], *, fields: Sequence[str]) -> "DataFormat":
        """Return the format of records of which a function makes records of this one.

        Args:
            convert: The function; a record for which it raises is a bad row, with the error as the reason.
        """

        def converted(record: Record) -> Record:
            try:
                return convert(record)
            except BadRow:
                raise
            except Exception as error:  # it is the user's
                raise BadRow(f"cannot be converted: {type(error).__name__}: {error}. Correct it.") from error

        def tokenize(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
            return _map_good(_each(records, converted), lambda good: self.tokenize(tokenizer, good))

        return dataclasses.replace(self, name="", fields=tuple(fields), tokenize=tokenize)

    def check(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Check that a tokenizer can be used."""
        if self.chats and not tokenizer.chat_template:
            raise ConfigError(
                f"the data is made of chats, but the tokenizer {str(tokenizer.name_or_path)!r} has no chat template. "
                "Use a tokenizer with one (chat_template.jinja beside tokenizer.json)."
            )


def _documents(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    def document(tokens: Sequence[int]) -> Example:
        return (TokenSequence(0, [*tokens, *_end(tokenizer, tokens)]),)

    texts = _each(records, lambda record: field(record, "text"))
    return _map_good(texts, lambda good: [document(ids) for ids in _ids(tokenizer, good)])


def _completions(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    def texts_of(record: Record) -> tuple[str, str]:
        return make_prompt(text=field(record, "prompt")).shown, field(record, "completion")

    def examples(good: Sequence[tuple[str, str]]) -> list[Example | BadRow]:
        appended = count_appended(tokenizer)
        prompts = [ids[: len(ids) - appended] for ids in _ids(tokenizer, [prompt for prompt, _ in good])]
        completions = _continuations(tokenizer, [completion for _, completion in good])
        return [
            _example(prompt, [*completion, *_end(tokenizer, completion)])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    return _map_good(_each(records, texts_of), examples)


def _chats(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    chats = _each(records, lambda record: _chat(tokenizer, _messages(record)))
    return _map_good(chats, lambda good: _answers(tokenizer, good))


def _whole_chats(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    chats = _each(records, lambda record: _whole_chat(tokenizer, _messages(record)))
    return _map_good(chats, lambda good: _answers(tokenizer, good))


def _pairs(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    def pair_of(record: Record) -> tuple[_Chat, _Chat]:
        chosen, rejected = (_messages(record, name) for name in ("chosen", "rejected"))
        if chosen[:-1] != rejected[:-1]:
            raise BadRow(
                "has 'chosen' and 'rejected' that differ before the last message; they must answer the same prompt. "
                "Correct the pair or remove it."
            )
        return _chat(tokenizer, chosen, "(chosen) "), _chat(tokenizer, rejected, "(rejected) ")

    def examples(good: Sequence[tuple[_Chat, _Chat]]) -> list[Example | BadRow]:
        answers = _answers(tokenizer, [chat for pair in good for chat in pair])
        return [_joined(*answers[number : number + 2]) for number in range(0, len(answers), 2)]

    return _map_good(_each(records, pair_of), examples)


def _scored_pairs(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    def logprobs(record: Record) -> list[float]:
        found = [field(record, name, (int, float)) for name in REFERENCE_FIELDS]
        if not all(math.isfinite(value) for value in found):
            raise BadRow(f"has {found} as {' and '.join(REFERENCE_FIELDS)}; both must be finite. Correct it.")
        return found

    def scored(example: Example | BadRow, values: list[float] | BadRow) -> Example | BadRow:
        if isinstance(example, BadRow) or isinstance(values, BadRow):
            return example if isinstance(example, BadRow) else values  # type: ignore[return-value]
        return tuple(dataclasses.replace(one, reference=each) for one, each in zip(example, values, strict=True))

    return [scored(*both) for both in zip(_pairs(tokenizer, records), _each(records, logprobs), strict=True)]


def _messages(record: Record, name: str = "messages") -> list[Any]:
    """The messages of a chat as their author wrote them, without the nulls of a column's other messages."""
    messages: list[Any] = field(record, name, list)
    try:
        return list(map(text_message, messages))
    except PromptError:  # it is said of the whole chat
        return [without_nulls(message) for message in messages]


def _joined(chosen: Example | BadRow, rejected: Example | BadRow) -> Example | BadRow:
    if isinstance(chosen, BadRow):
        return BadRow(f"(chosen) {chosen}")
    if isinstance(rejected, BadRow):
        return BadRow(f"(rejected) {rejected}")
    return (*chosen, *rejected)


def _chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]], side: str = "") -> _Chat:
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    if len(messages) < 2 or roles[-1] != "assistant":
        raise BadRow(
            f"{side}has {len(messages)} messages and ends with role {roles[-1] if roles else None!r}; it must have a "
            "prompt and end with the assistant's answer. Correct it or remove it."
        )
    if not isinstance(messages[-1].get("content"), str) and not messages[-1].get("tool_calls"):
        raise BadRow(f"{side}has an answer without a text as its 'content'. Correct it or remove it.")
    before = [dict(message) for message in make_prompt(messages=tuple(messages[:-1])).messages or ()]
    try:
        prompt = chat_text(tokenizer, before, add_generation_prompt=True)
        text = chat_text(tokenizer, [*before, messages[-1]])
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
    return _Chat(text, [(len(prompt), len(text))])


def _whole_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]) -> _Chat:
    """A chat of which every answer is a target: each as if it were the last, at the same place of the whole text."""
    whole = _chat(tokenizer, messages)
    answers: list[tuple[int, int]] = []
    for number, message in enumerate(messages[:-1], 1):
        if message["role"] != "assistant":
            continue
        part = _chat(tokenizer, messages[:number])
        if not whole.text.startswith(part.text):
            raise BadRow(
                f"has a chat whose text up to message {number} is another one where messages follow, so it is not "
                "known where this answer is. Use data.train_on: last, or a chat template that writes a message the "
                "same whatever follows."
            )
        answers += part.answers
    return _Chat(whole.text, [*answers, *whole.answers])


def _answers(tokenizer: "PreTrainedTokenizerBase", chats: Sequence[_Chat]) -> list[Example | BadRow]:
    """Chats as tokens; those of an answer are the ones that hold a character of it."""
    if not getattr(tokenizer, "is_fast", False):
        return _answers_by_prefix(tokenizer, chats)
    texts = [chat.text for chat in chats]
    found = token_ids(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
    examples: list[Example | BadRow] = []
    for chat, ids, offsets in zip(chats, found["input_ids"], found["offset_mapping"], strict=True):
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        spans = [(bisect.bisect_right(ends, begin), bisect.bisect_left(starts, end)) for begin, end in chat.answers]
        examples.append(_with_targets(ids, spans))
    return examples


def _answers_by_prefix(tokenizer: "PreTrainedTokenizerBase", chats: Sequence[_Chat]) -> list[Example | BadRow]:
    """The same for a tokenizer that does not say which characters a token holds."""
    wholes = _ids(tokenizer, [chat.text for chat in chats], add_special_tokens=False)
    examples: list[Example | BadRow] = []
    for chat, whole in zip(chats, wholes, strict=True):
        bounds = [bound for answer in chat.answers for bound in answer]
        befores = _ids(tokenizer, [chat.text[:bound] for bound in bounds], add_special_tokens=False)
        if all(list(whole[: len(before)]) == list(before) for before in befores):
            examples.append(_with_targets(whole, list(itertools.batched(map(len, befores), 2))))
            continue
        examples.append(
            BadRow(
                "has a token that holds the end of one message and the beginning of the next, and the tokenizer "
                f"{str(tokenizer.name_or_path)!r} does not say which characters a token holds. Use its fast version "
                "(a tokenizer.json), which does."
            )
        )
    return examples


def _with_targets(ids: Sequence[int], spans: Sequence[tuple[int, ...]]) -> Example | BadRow:
    """Tokens of which those in spans, ascending, are targets; the last span ends with them."""
    tokens, first = list(ids), spans[0][0]
    for (_, end), (start, _) in itertools.pairwise(spans):
        tokens[end:start] = [~token for token in tokens[end:start]]
    return _example(tokens[:first], tokens[first:])


def _example(prompt: Sequence[int], target: Sequence[int]) -> Example | BadRow:
    if not prompt:
        return BadRow("has a prompt of 0 tokens; at least 1 is needed. Correct it or remove it.")
    if not target:
        return BadRow("has a completion of 0 tokens; at least 1 is needed. Correct it or remove it.")
    return (TokenSequence(len(prompt), [*prompt, *target]),)


def make_prompt(**values: Any) -> Prompt:
    """Return a prompt of a record."""
    try:
        return Prompt(id=0, **values)
    except PromptError as error:
        raise BadRow(f"has a prompt that cannot be used: {str(error).removeprefix('prompt 0 ')}") from error


def _ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], **options: bool) -> list[list[int]]:
    return list(token_ids(tokenizer, texts, **options)["input_ids"])


def _continuations(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts that go on from others, without the space that some tokenizers put before a text of its own
    (Llama 2, Mistral).
    """
    line = "\n"
    before, lone, after = _ids(tokenizer, [line, "a", line + "a"], add_special_tokens=False)
    if after != [*before, *lone]:
        wholes = _ids(tokenizer, [line + text for text in texts], add_special_tokens=False)
        if all(whole[: len(before)] == before for whole in wholes):
            return [whole[len(before) :] for whole in wholes]
    return _ids(tokenizer, texts, add_special_tokens=False)


def _end(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> list[int]:
    """The end-of-sequence token, where a tokenizer has one and has not put it at the end itself."""
    end = tokenizer.eos_token_id
    return [] if end is None or list(tokens[-1:]) == [end] else [int(end)]


def _each[T](records: Sequence[Record], read: Callable[[Record], T]) -> list[T | BadRow]:
    found: list[T | BadRow] = []
    for record in records:
        try:
            found.append(read(record))
        except BadRow as bad:
            found.append(bad)
    return found


def _map_good[T](
    found: Sequence[T | BadRow], function: Callable[[Sequence[T]], Sequence[Example | BadRow]]
) -> list[Example | BadRow]:
    """Apply a function to all that can be used at once, and leave the others in their places."""
    good = [one for one in found if not isinstance(one, BadRow)]
    try:
        examples = iter(function(good) if good else [])
    except PromptError as error:  # of one of them
        if len(good) > 1:
            return [example for one in found for example in _map_good([one], function)]
        examples = iter([BadRow(str(error))])
    return [one if isinstance(one, BadRow) else next(examples) for one in found]


REFERENCE_FIELDS: Final = ("ref_chosen_logps", "ref_rejected_logps")
"""The fields of log-probabilities under a reference model, sums over the tokens of an answer; the names are TRL's."""

_CHAT = DataFormat(fields=("messages",), tokenize=_chats, chats=True)
_PAIRS = DataFormat(fields=("chosen", "rejected"), tokenize=_pairs, chats=True, pairs=True)

FORMATS: Final[Mapping[str, DataFormat]] = {
    name: dataclasses.replace(each, name=name)
    for name, each in {
        "text": DataFormat(fields=("text",), tokenize=_documents, documents=True),
        "prompt_completion": DataFormat(fields=("prompt", "completion"), tokenize=_completions),
        "chat": _CHAT,
        "chat_all": dataclasses.replace(_CHAT, tokenize=_whole_chats),
        "preference": _PAIRS,
        "preference_with_reference": dataclasses.replace(
            _PAIRS, fields=(*_PAIRS.fields, *REFERENCE_FIELDS), tokenize=_scored_pairs, reference=True
        ),
    }.items()
}
"""The formats by name: in a ``chat`` the last answer is the target, in ``chat_all`` every one."""
