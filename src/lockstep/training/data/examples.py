"""From records to tokens: documents, prompts with completions, chats and preferences."""

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
from lockstep.plugins import load_object, own_error_text
from lockstep.text import count_appended
from lockstep.text.tokenize import token_ids
from lockstep.training.data.chats import Chat, chat_of, make_prompt, messages_of, whole_chat
from lockstep.training.data.records import BadRow, Record, field

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """The tokens of one sequence.

    Args:
        n_prompt: The number of its first tokens that are not targets.
        tokens: Token ids. A later one that is no target is stored as its complement ``~id``, which is negative.
        value: A number of the record: of a side of a pair, the log-probability of its targets under a reference model;
            of an unpaired answer, 1 where it is desirable, else 0; None where the records have none.
    """

    n_prompt: int
    tokens: Sequence[int] | np.ndarray
    value: float | None = None


type Example = tuple[TokenSequence, ...]
"""One sequence; of a pair the chosen and the rejected one."""


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
        optional: The fields that it reads where a record has them.
        documents: Whether examples are documents, which may be cut and go on in another row.
        chats: Whether the tokenizer must have a chat template.
        pairs: Whether an example is a chosen and a rejected sequence.
        reference: Whether they have their log-probabilities under a reference model.
        labels: Whether an example has a label, which says whether it is desirable.

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
    optional: tuple[str, ...] = ()
    documents: bool = False
    chats: bool = False
    pairs: bool = False
    reference: bool = False
    labels: bool = False

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
        loaded: DataFormat = load_object(name, "data.format", cls)
        # What its module says is a part of the cache's key; what that imports is not.
        source = inspect.getsource(sys.modules[name.partition(":")[0]])
        digest = hashlib.sha256(source.encode()).hexdigest()
        return dataclasses.replace(loaded, name=f"{name} {digest[:16]}")

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
                raise BadRow(f"cannot be converted: {own_error_text(error)}. Correct it.") from error

        def tokenize(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
            return _map_good(_each(records, converted), lambda good: self.tokenize(tokenizer, good))

        return dataclasses.replace(self, name="", fields=tuple(fields), optional=(), tokenize=tokenize)

    @property
    def preferences(self) -> bool:
        """Whether an example says which of two answers is better, or whether one is good."""
        return self.pairs or self.labels

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
    chats = _each(records, lambda record: chat_of(tokenizer, messages_of(record), tools=record.get("tools")))
    return _map_good(chats, lambda good: _answers(tokenizer, good))


def _whole_chats(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    chats = _each(records, lambda record: whole_chat(tokenizer, messages_of(record), record.get("tools")))
    return _map_good(chats, lambda good: _answers(tokenizer, good))


def _pairs(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    def pair_of(record: Record) -> tuple[Chat, Chat]:
        chosen, rejected = (answered(record, messages_of(record, name)) for name in ("chosen", "rejected"))
        tools = record.get("tools")
        pair = chat_of(tokenizer, chosen, "(chosen) ", tools), chat_of(tokenizer, rejected, "(rejected) ", tools)
        if chosen[:-1] != rejected[:-1]:
            raise BadRow(
                "has 'chosen' and 'rejected' that differ before the last message; they must answer the same prompt. "
                "Correct the pair or remove it."
            )
        return pair

    def answered(record: Record, answer: list[Any]) -> list[Any]:
        """An answer behind the messages of a 'prompt' of its own, as TRL has them; one without begins a chat."""
        alone = len(answer) == 1 and isinstance(record.get("prompt"), list)
        return [*messages_of(record, "prompt"), *answer] if alone else answer

    def examples(good: Sequence[tuple[Chat, Chat]]) -> list[Example | BadRow]:
        answers = _answers(tokenizer, [chat for pair in good for chat in pair])
        return [_joined(*answers[number : number + 2]) for number in range(0, len(answers), 2)]

    return _map_good(_each(records, pair_of), examples)


def _scored_pairs(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    def logprobs(record: Record) -> list[float]:
        values = [field(record, name, (int, float)) for name in REFERENCE_FIELDS]
        if not all(math.isfinite(value) for value in values):
            raise BadRow(f"has {values} as {' and '.join(REFERENCE_FIELDS)}; both must be finite. Correct it.")
        return values

    def scored(example: Example | BadRow, values: list[float] | BadRow) -> Example | BadRow:
        if isinstance(example, BadRow) or isinstance(values, BadRow):
            return example if isinstance(example, BadRow) else values  # type: ignore[return-value]
        return tuple(
            dataclasses.replace(sequence, value=logprob) for sequence, logprob in zip(example, values, strict=True)
        )

    return [
        scored(*example_and_values)
        for example_and_values in zip(_pairs(tokenizer, records), _each(records, logprobs), strict=True)
    ]


def _labelled(tokenizer: "PreTrainedTokenizerBase", records: Sequence[Record]) -> list[Example | BadRow]:
    """Texts or chats with labels, each tokenised as without one."""

    def parts(record: Record) -> tuple[Record, float]:
        prompt, completion = (field(record, name, (str, list)) for name in ("prompt", "completion"))
        label = float(field(record, "label", bool))
        if isinstance(prompt, str) and isinstance(completion, str):
            return {"prompt": prompt, "completion": completion}, label
        if isinstance(prompt, str) or isinstance(completion, str) or len(completion) != 1:
            raise BadRow(
                "has a 'prompt' and a 'completion' that do not go together; both must be texts, or the one a list of "
                "messages and the other a list of the one message that answers them. Correct it or remove it."
            )
        return {"messages": [*prompt, *completion], "tools": record.get("tools")}, label

    def examples(good: Sequence[tuple[Record, float]]) -> list[Example | BadRow]:
        chats = iter(_chats(tokenizer, [record for record, _ in good if "messages" in record]))
        texts = iter(_completions(tokenizer, [record for record, _ in good if "messages" not in record]))
        tokenised = [(next(chats if "messages" in record else texts), label) for record, label in good]
        return [
            example if isinstance(example, BadRow) else (dataclasses.replace(example[0], value=label),)
            for example, label in tokenised
        ]

    return _map_good(_each(records, parts), examples)


def _joined(chosen: Example | BadRow, rejected: Example | BadRow) -> Example | BadRow:
    if isinstance(chosen, BadRow):
        return BadRow(f"(chosen) {chosen}")
    if isinstance(rejected, BadRow):
        return BadRow(f"(rejected) {rejected}")
    return (*chosen, *rejected)


def _answers(tokenizer: "PreTrainedTokenizerBase", chats: Sequence[Chat]) -> list[Example | BadRow]:
    """Chats as tokens; those of an answer are the ones that hold a character of it."""
    if not getattr(tokenizer, "is_fast", False):
        return _answers_by_prefix(tokenizer, chats)
    texts = [chat.text for chat in chats]
    encoded = token_ids(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
    examples: list[Example | BadRow] = []
    for chat, ids, offsets in zip(chats, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        spans = [(bisect.bisect_right(ends, begin), bisect.bisect_left(starts, end)) for begin, end in chat.answers]
        examples.append(_with_targets(ids, spans))
    return examples


def _answers_by_prefix(tokenizer: "PreTrainedTokenizerBase", chats: Sequence[Chat]) -> list[Example | BadRow]:
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
    results: list[T | BadRow] = []
    for record in records:
        try:
            results.append(read(record))
        except BadRow as bad:
            results.append(bad)
    return results


def _map_good[T](
    items: Sequence[T | BadRow], function: Callable[[Sequence[T]], Sequence[Example | BadRow]]
) -> list[Example | BadRow]:
    """Apply a function to all that can be used at once, and leave the others in their places."""
    good = [item for item in items if not isinstance(item, BadRow)]
    try:
        examples = iter(function(good) if good else [])
    except PromptError as error:  # of one of them
        if len(good) > 1:
            return [example for item in items for example in _map_good([item], function)]
        examples = iter([BadRow(str(error))])
    return [item if isinstance(item, BadRow) else next(examples) for item in items]


REFERENCE_FIELDS: Final = ("ref_chosen_logps", "ref_rejected_logps")
"""The fields of log-probabilities under a reference model, sums over the tokens of an answer; the names are TRL's."""

_CHAT = DataFormat(fields=("messages",), optional=("tools",), tokenize=_chats, chats=True)
_PAIRS = DataFormat(
    fields=("chosen", "rejected"), optional=("prompt", "tools"), tokenize=_pairs, chats=True, pairs=True
)

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
        "unpaired_preference": DataFormat(
            fields=("prompt", "completion", "label"), optional=("tools",), tokenize=_labelled, labels=True
        ),
    }.items()
}
"""The formats by name: in a ``chat`` the last answer is the target, in ``chat_all`` every one."""
