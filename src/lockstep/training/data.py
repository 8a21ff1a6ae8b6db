"""Training data: text, prompts with completions, chats and preference pairs, as token rows of one length."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from lockstep.errors import ConfigError, PromptError
from lockstep.text import Prompt, encode
from lockstep.training.records import Record, field, read_records
from lockstep.training.rows import TokenizedRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Example = tuple[str, Sequence[int], Sequence[int]]
"""Where the example came from (``file:line``), its prompt tokens (masked from the loss) and its target tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which files to train on, and how long a row is.

    Raises:
        ConfigError: A value is out of its range.
    """

    train_urls: tuple[str, ...] = ()
    """Files to train on: paths or URLs that fsspec knows; ``.jsonl`` has one JSON object per line."""
    max_seq_len: int | None = None
    """Tokens of a row; null: the model's ``max_seq_len``."""
    truncate: bool = False
    """Cut examples that are longer than a row (an example left without a target is dropped, and counted in the log);
    otherwise a longer example is an error."""
    shuffle: bool = True
    """Draw every epoch in another order."""

    def __post_init__(self) -> None:
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ConfigError(f"data.max_seq_len is {self.max_seq_len}; it must be at least 2. Raise it, or use null.")

    def row_length(self, model_max_seq_len: int) -> int:
        """Return the number of tokens of a row.

        Args:
            model_max_seq_len: The number of tokens of the model's longest sequence.

        Returns:
            ``max_seq_len``, or the model's where that is null.

        Raises:
            ConfigError: The rows would be longer than the model allows.
        """
        if self.max_seq_len is None:
            return model_max_seq_len
        if self.max_seq_len > model_max_seq_len:
            raise ConfigError(
                f"data.max_seq_len is {self.max_seq_len}, but the model's max_seq_len is {model_max_seq_len}. Set "
                f"it to at most {model_max_seq_len}, or use a model that is built for longer sequences."
            )
        return self.max_seq_len

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and type of one row of each column that ``load`` makes, without reading any data.

        Args:
            model_max_seq_len: The number of tokens of the model's longest sequence.

        Raises:
            ConfigError: The rows would be longer than the model allows.
        """
        row = (self.row_length(model_max_seq_len),)
        return {"tokens": jax.ShapeDtypeStruct(row, np.int32), "loss_mask": jax.ShapeDtypeStruct(row, np.bool_)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmDataConfig(DataConfig):
    """The data of `train-lm`."""

    format: Literal["text", "prompt_completion", "chat"] = "text"
    """``text``: field ``text``, documents one after the other, every token a target. ``prompt_completion``: fields
    ``prompt`` and ``completion``. ``chat``: field ``messages``; the last one, the assistant's, is the target."""

    def load(self, tokenizer: "PreTrainedTokenizerBase", model_max_seq_len: int, seed: int) -> TokenizedRows:
        """Read and tokenise the data.

        Args:
            tokenizer: The tokenizer of the model.
            model_max_seq_len: The number of tokens of the model's longest sequence.
            seed: The seed of the order of the rows.

        Returns:
            The columns ``tokens`` int32 ``[row, position]`` and ``loss_mask`` bool of the same shape.

        Raises:
            ConfigError: A file or a record cannot be used; the message names its place.
        """
        length = self.row_length(model_max_seq_len)
        records = read_records(self.train_urls)
        if self.format == "text":
            tokens, mask = _pack((_document(tokenizer, record) for record in records), length)
        else:
            read = _completion_example if self.format == "prompt_completion" else _chat_example
            tokens, mask = _pad([read(tokenizer, record) for record in records], length, self.truncate)
        return TokenizedRows(columns={"tokens": tokens, "loss_mask": mask}, seed=seed, shuffle=self.shuffle)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(DataConfig):
    """The data of `train-simpo`: JSON lines in the chat format of UltraFeedback-binarized, with the fields ``chosen``
    and ``rejected``, each a list of ``{role, content}`` that ends with the assistant's answer; all before it is the
    prompt.
    """

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        single = super().columns(model_max_seq_len)
        return {name: jax.ShapeDtypeStruct((2, *one.shape), one.dtype) for name, one in single.items()}

    def load(self, tokenizer: "PreTrainedTokenizerBase", model_max_seq_len: int, seed: int) -> TokenizedRows:
        """Read and tokenise the pairs.

        Args:
            tokenizer: The tokenizer of the model; it needs a chat template.
            model_max_seq_len: The number of tokens of the model's longest sequence.
            seed: The seed of the order of the pairs.

        Returns:
            The columns ``tokens`` int32 ``[row, 2, position]`` (chosen, rejected) and ``loss_mask`` bool of the same
            shape, true for the completions.

        Raises:
            ConfigError: A file or a pair cannot be used; the message names its place.
        """
        chosen, rejected = [], []
        for record in read_records(self.train_urls):
            pair = [field(record, name, list) for name in ("chosen", "rejected")]
            if pair[0][:-1] != pair[1][:-1]:
                raise ConfigError(
                    f"{record[0]}: 'chosen' and 'rejected' differ before the last message; they must answer the same "
                    "prompt. Correct the pair or remove it."
                )
            chosen.append(_messages_example(tokenizer, f"{record[0]} (chosen)", pair[0]))
            rejected.append(_messages_example(tokenizer, f"{record[0]} (rejected)", pair[1]))
        length = self.row_length(model_max_seq_len)
        if self.truncate:
            fits = [len(a[1]) < length and len(b[1]) < length for a, b in zip(chosen, rejected, strict=True)]
            _log_dropped(len(fits) - sum(fits), len(fits), length)
            chosen = [example for example, keep in zip(chosen, fits, strict=True) if keep]
            rejected = [example for example, keep in zip(rejected, fits, strict=True) if keep]
        sides = [_pad(side, length, self.truncate) for side in (chosen, rejected)]
        columns = {
            "tokens": np.stack([tokens for tokens, _ in sides], axis=1),
            "loss_mask": np.stack([mask for _, mask in sides], axis=1),
        }
        return TokenizedRows(columns=columns, seed=seed, shuffle=self.shuffle)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoDataConfig(DataConfig):
    """The data of `train-grpo`: JSON lines in the format of GSM8K, with the fields ``question`` and ``answer``. A row
    has prompt and sampled answer together, at most ``max_seq_len`` tokens; ``truncate`` leaves out the questions that
    leave too little room for an answer.
    """

    format: Literal["chat", "text"] = "chat"
    """``chat``: the question is the user's message, through the tokenizer's chat template. ``text``: the model goes on
    from the question itself."""
    system_prompt: str | None = None
    """The system's message before the question, with ``format: chat``; null: none."""
    instruction: str = ""
    """Text after each question, such as how to write the final answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.system_prompt is not None and self.format == "text":
            raise ConfigError(
                "data.system_prompt is given and data.format is text, which has no system message. Use format: chat, "
                "or put the text into data.instruction."
            )


def _document(tokenizer: "PreTrainedTokenizerBase", record: Record) -> list[int]:
    return [*tokenizer.encode(field(record, "text")), *_end(tokenizer)]


def _completion_example(tokenizer: "PreTrainedTokenizerBase", record: Record) -> Example:
    prompt = _encode_prompt(tokenizer, record[0], text=field(record, "prompt"))
    completion = tokenizer.encode(field(record, "completion"), add_special_tokens=False)
    return record[0], prompt, [*completion, *_end(tokenizer)]


def _chat_example(tokenizer: "PreTrainedTokenizerBase", record: Record) -> Example:
    return _messages_example(tokenizer, record[0], field(record, "messages", list))


def _messages_example(
    tokenizer: "PreTrainedTokenizerBase", place: str, messages: Sequence[Mapping[str, str]]
) -> Example:
    if len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise ConfigError(
            f"{place} has {len(messages)} messages and ends with role "
            f"{messages[-1].get('role') if messages else None!r}; it must have a prompt and end with the assistant's "
            "answer. Correct it or remove it."
        )
    prompt = _encode_prompt(tokenizer, place, messages=tuple(messages[:-1]))
    text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
    assert isinstance(text, str)
    whole = tokenizer.encode(text, add_special_tokens=False)
    if tuple(whole[: len(prompt)]) != prompt:
        raise ConfigError(
            f"{place}: the tokens of the whole chat do not begin with those of its prompt, so it is not "
            "known where the answer begins. Use a chat template whose generation prompt begins an assistant's message."
        )
    return place, prompt, whole[len(prompt) :]


def _encode_prompt(tokenizer: "PreTrainedTokenizerBase", place: str, **prompt: Any) -> tuple[int, ...]:
    # The function that makes the prompts of the samples, so that training and sampling see the same tokens.
    try:
        return encode(tokenizer, [Prompt(id=0, **prompt)])[0]
    except PromptError as error:
        raise ConfigError(f"{place}: {error}") from error


def _end(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _pack(documents: Iterable[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate documents and cut them into rows of ``length`` tokens; what fills up the last row is masked."""
    pieces = [np.asarray(document, np.int32) for document in documents]
    stream = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    n_rows = -(-len(stream) // length)
    tokens, mask = np.zeros(n_rows * length, np.int32), np.zeros(n_rows * length, bool)
    tokens[: len(stream)], mask[: len(stream)] = stream, True
    # A row of one token has no target; its share of the loss would be empty.
    n_rows -= int(len(stream) % length == 1)
    return tokens.reshape(-1, length)[:n_rows], mask.reshape(-1, length)[:n_rows]


def _pad(examples: Sequence[Example], length: int, truncate: bool) -> tuple[np.ndarray, np.ndarray]:
    """Make one row of ``length`` tokens of each example, filled up with masked zeros."""
    kept = [example for example in examples if not truncate or len(example[1]) < length]
    _log_dropped(len(examples) - len(kept), len(examples), length)
    tokens, mask = np.zeros((len(kept), length), np.int32), np.zeros((len(kept), length), bool)
    for row, (place, prompt, target) in enumerate(kept):
        if not target:
            raise ConfigError(f"{place} has a completion of 0 tokens; at least 1 is needed. Correct it or remove it.")
        size = len(prompt) + len(target)
        if size > length and not truncate:
            raise ConfigError(
                f"{place} has {size} tokens, but a row has {length}. Raise data.max_seq_len to at least {size}, "
                "shorten the example, or set data.truncate: true to cut it."
            )
        tokens[row, :size] = [*prompt, *target][:length]
        mask[row, len(prompt) : size] = True
    return tokens, mask


def _log_dropped(dropped: int, total: int, length: int) -> None:
    if dropped:
        log.warning(
            "truncate: %d of %d examples dropped, their prompts fill a row of %d tokens", dropped, total, length
        )
