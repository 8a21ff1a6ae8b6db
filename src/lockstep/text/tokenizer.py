"""Hugging Face tokenizers: text of tokens, what identifies one, and whether it fits the model."""

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.printable import get_logger
from lockstep.text.answer import CHANNEL, HARMONY, MARKERS, MESSAGE
from lockstep.text.endings import ENDING_FILES, ending_of, stop_ids, stop_sources
from lockstep.text.template_date import template_date
from lockstep.text.template_kwargs import template_kwargs
from lockstep.text.tokenize import panics_as_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

_BACKEND, _FAST = "TokenizersBackend", "PreTrainedTokenizerFast"  # one class; transformers 4 knows the second name
_CONTEXT = 8  # tokens before a text that are decoded with it, at least
_REPLACEMENT = "\ufffd"  # the character that stands for an incomplete one in decoded text
_CHARACTER_TOKENS = 4
_SHOWN = 3  # tokens that a warning names
_OF_LAST_CALL = ("padding", "truncation")  # parts of a fast tokenizer's backend that every call sets anew


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A digest of all that decides which tokens a text has and which text tokens have.

    For a fast tokenizer that is its whole backend (normaliser, merges, post-processor, decoder, added tokens), for a
    slow one its vocabulary and the arguments that it was made with; for both the class, special tokens, chat template
    with its fixed date and its variables. The place that it was loaded from, and the padding and truncation of its last
    call, do not count.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        parts = {name: part for name, part in json.loads(backend.to_str()).items() if name not in _OF_LAST_CALL}
    else:
        settings = {name: value for name, value in tokenizer.init_kwargs.items() if not _is_place(name)}
        parts = {"vocab": tokenizer.get_vocab(), "init_kwargs": settings, "added": tokenizer.added_tokens_decoder}
    parts |= {
        "class": type(tokenizer).__name__,
        "special tokens": tokenizer.special_tokens_map,
        "chat template": tokenizer.chat_template,
        **({"date": date} if (date := template_date(tokenizer)) else {}),
        **({"chat template kwargs": kwargs} if (kwargs := template_kwargs(tokenizer)) else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def token_count(tokenizer: "PreTrainedTokenizerBase") -> int:
    """One more than the largest token id; the model's embedding may have more rows."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocab(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Check that the tokens of a tokenizer have rows in the model's embedding.

    Tokens that were added to the vocabulary, such as Gemma 3's ``<image_soft_token>``, may have none: a warning names
    them once, and a text is refused where it has one (`unknown_token`).

    Raises:
        ConfigError: A token of the vocabulary itself has none.
    """
    beyond = {token: text for text, token in tokenizer.get_vocab().items() if token >= vocab_size}
    if not beyond:
        return
    if ordinary := beyond.keys() - getattr(tokenizer, "added_tokens_decoder", {}).keys():
        largest = max(ordinary)
        token = beyond[largest]
        raise ConfigError(
            f"tokenizer and model vocabulary do not match: the tokenizer's largest token id is {largest} ({token!r}), "
            f"the model's vocabulary has {vocab_size} entries (ids 0 to {vocab_size - 1}). Use the tokenizer the "
            f"model was trained with, or a model with a vocabulary of at least {largest + 1}."
        )
    sources = stop_sources(tokenizer)
    ends = [f"{text!r} ends an answer as {sources[token]} says" for token, text in beyond.items() if token in sources]
    tokens = ", ".join(f"{text!r} ({token})" for token, text in sorted(beyond.items())[:_SHOWN])
    _warn_of_beyond(len(beyond), vocab_size, tokens + ", …" * (len(beyond) > _SHOWN), "; ".join(ends))


@functools.cache
def _warn_of_beyond(count: int, rows: int, tokens: str, ends: str) -> None:
    log.warning(
        "%d added tokens of the tokenizer are beyond the %d rows of the model's embedding: %s. A prompt or an example "
        "that has one is refused%s.",
        count,
        rows,
        tokens,
        ends and f"; {ends}, and the model can never write it",
    )


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """The special tokens, which are no part of a text (`decode`), with their ids: those that the tokenizer names, and
    others that were added as such, like Llama 3's ``<|start_header_id|>``; not the markers of an answer's parts.
    """
    markers = part_markers(tokenizer).values()
    named: dict[str, Any] = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    texts = named | {str(token): number for number, token in added.items() if token.special}
    return {text: int(token) for text, token in texts.items() if text and token is not None and text not in markers}


def write_tokenizer(tokenizer: Any, directory: str | os.PathLike[str]) -> None:
    """Write a tokenizer's files, and its `stop_ids` as a ``generation_config.json``, which ``save_pretrained`` leaves
    out, with the ``stop_strings`` of its checkpoint; without it, who loads the files goes on where an answer ends.
    """
    tokenizer.save_pretrained(os.fspath(directory))
    settings = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "pad_token_id")}
    settings = {name: value for name, value in settings.items() if value is not None}
    settings |= {"stop_strings": list(texts)} if (texts := ending_of(tokenizer).texts) else {}
    if ends := list(stop_ids(tokenizer)):
        text = json.dumps(settings | {"eos_token_id": ends}, indent=2)
        write_file(Path(directory) / ENDING_FILES[0], text + "\n")
    file = Path(directory) / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if config.get("tokenizer_class") == _BACKEND:
        write_file(file, json.dumps(config | {"tokenizer_class": _FAST}, indent=2) + "\n")


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], after: Sequence[int] = ()) -> str:
    """The text of token ids, without special tokens but those that mark the parts of an answer (`split_answer`); spaces
    are not cleaned up.

    Args:
        after: The tokens that stand before them, such as those of the prompt. The text is what ``tokens`` add to that
            of ``after``: a decoder as of Llama 2 and Mistral leaves out the space that a text begins with.
    """
    return added_text(decoder(tokenizer), tokens, after)


def added_text(decoded: Callable[[list[int]], str], tokens: Sequence[int], after: Sequence[int]) -> str:
    """The text that token ids add to that of those before them.

    Args:
        decoded: The text of token ids, of any tokenizer.
    """
    context, text = context_of(decoded, tokens, after)
    return decoded([*context, *tokens])[len(text) :]


def token_texts(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], after: Sequence[int] = ()) -> list[str]:
    """The text that each token adds to that of those before it.

    A character that several tokens make belongs to the last of them. Joined, the texts are what ``decode`` returns, but
    for tokenizers that spell a token otherwise where more than `_CONTEXT` tokens before it are left out.
    """
    decoded = decoder(tokenizer)
    context, _ = context_of(decoded, tokens, after)
    every, begin = [*context, *tokens], len(context)
    texts: list[str] = []
    done = begin  # tokens whose text is complete
    for end in range(begin + 1, len(every) + 1):
        first = max(0, done - _CONTEXT)
        known, text = decoded(every[first:done]), decoded(every[first:end])
        # Bytes that never become a character are told after as many tokens as a character can have.
        whole = not text.endswith(_REPLACEMENT) or end - done >= _CHARACTER_TOKENS or end == len(every)
        texts.append(text[len(known) :] if whole else "")
        done = end if whole else done
    return texts


def context_of(
    decoded: Callable[[list[int]], str], tokens: Sequence[int], after: Sequence[int]
) -> tuple[list[int], str]:
    """The last of the tokens before others that are decoded with them, from where a character begins, and their text;
    none where their text is not the same with the others behind it: bytes of SentencePiece that go on.

    Args:
        decoded: The text of token ids, as of `decoder`.
    """
    if not after:
        return [], ""
    size = _CONTEXT
    context = list(after[-size:])
    while (text := decoded(context)).lstrip()[:1] in ("", _REPLACEMENT) and size < len(after):
        size *= 2
        context = list(after[-size:])
    return (context, text) if decoded([*context, *tokens[:1]]).startswith(text) else ([], "")


def decoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[Sequence[int]], str]:
    """Return the function that makes texts of token ids (`decode`): to make it takes longer than most texts."""
    markers = part_markers(tokenizer)

    def text_of(tokens: Sequence[int]) -> str:
        with panics_as_errors():
            text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decoded(tokens: Sequence[int]) -> str:
        if markers.keys().isdisjoint(tokens):
            return text_of(tokens)
        parts = itertools.groupby(tokens, lambda token: token if token in markers else None)
        return "".join(
            text_of(list(part)) if token is None else markers[token] * len(list(part)) for token, part in parts
        )

    return decoded


def part_markers(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """The markers of an answer's parts that are tokens of a tokenizer, by id."""
    ids: Any = tokenizer.convert_tokens_to_ids(list(MARKERS))
    named = {text: token for text, token in zip(MARKERS, ids, strict=True) if token is not None}
    known = {token: text for text, token in named.items() if tokenizer.convert_ids_to_tokens(token) == text}
    # Others than gpt-oss have an `<|end|>` or `<|start|>` that is no part of a text (Phi).
    left_out = () if {CHANNEL, MESSAGE} <= set(known.values()) else HARMONY
    return {token: text for token, text in known.items() if text not in left_out}


def _is_place(name: str) -> bool:
    """Whether an argument of a tokenizer says where it is read from, which may differ between hosts."""
    return name == "name_or_path" or name.endswith(("_file", "_dir"))
