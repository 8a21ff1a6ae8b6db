"""The fields that every configuration which samples has, and earlier answers to the same prompt, kept as drafts."""

import dataclasses
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from lockstep.engine.config import CapacityFields, EngineConfig
from lockstep.engine.sampling.filters import check_named_filters
from lockstep.errors import ConfigError, LockstepError
from lockstep.json_text import typed
from lockstep.types import Drafts, SamplingParams, SamplingRules

DraftSource = Literal["auto", "last_round", "ngram", "none"]
"""``last_round``: the last answers to the same prompt; ``ngram``: what followed the last tokens in prompt and answers
before; ``auto``: both; ``none``: plain decoding."""

MAX_TOKENS = 1 << 24
"""Tokens of earlier answers that a host keeps at most, 64 MiB; those that were kept longest ago go first."""


class EarlierAnswers:
    """The last answers to each prompt, as drafts of the next ones.

    To lose them changes no token, but which programs sample them, and so the last bits of log-probabilities: a run that
    goes on needs them.
    """

    def __init__(self, source: DraftSource, max_tokens: int = MAX_TOKENS) -> None:
        self._source, self._max_tokens = source, max_tokens
        self._answers: dict[Hashable, list[np.ndarray]] = {}
        self._agreement: dict[Hashable, tuple[int, int]] = {}
        self._kept = 0

    def drafts(self, prompt: Hashable) -> Drafts | None:
        """Return the drafts of a request; None where there are to be none, and so no programs that verify them.

        Args:
            prompt: What tells the prompt from all others.
        """
        if self._source == "none":
            return None
        answers = tuple(tuple(answer.tolist()) for answer in self._answers.get(prompt, ()))
        compared, right = self._agreement.get(prompt, (0, 0))
        return Drafts(answers=answers, ngrams=self._source in ("auto", "ngram"), compared=compared, right=right)

    def keep(self, prompt: Hashable, completions: Iterable[Sequence[int]]) -> None:
        """Keep the answers to a prompt in place of those before, and how many of their tokens are the same.

        Args:
            prompt: What tells the prompt from all others.
            completions: The tokens of each answer, in the order of the generations.
        """
        if self._source not in ("auto", "last_round"):
            return
        before = self._answers.get(prompt, [])
        self._forget(prompt)
        answers = [np.array(tokens, np.int32) for tokens in completions]
        pairs = list(zip(before, answers, strict=False))
        self._agreement[prompt] = (
            sum(min(len(old), len(new)) for old, new in pairs),
            sum(int((old[: len(new)] == new[: len(old)]).sum()) for old, new in pairs),
        )
        self._answers[prompt] = answers
        self._kept += sum(map(len, answers))
        while self._kept > self._max_tokens:
            self._forget(next(iter(self._answers)))

    def copy(self) -> "EarlierAnswers":
        """Return what is kept now, whatever is kept later."""
        copied = EarlierAnswers(self._source, self._max_tokens)
        copied._answers, copied._agreement = dict(self._answers), dict(self._agreement)
        copied._kept = self._kept
        return copied

    def state(self) -> dict[str, Any]:
        """Return what is kept, for a checkpoint: 4 bytes per token."""
        kept = [
            (key, [len(answer) for answer in answers], self._agreement[key]) for key, answers in self._answers.items()
        ]
        tokens = np.concatenate(
            [np.zeros(0, "<i4"), *(answer for answers in self._answers.values() for answer in answers)]
        )
        return {"kept": json.dumps(kept), "tokens": tokens.astype(np.int32)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Keep what `state` returned in an earlier process; nothing where no earlier answers are wanted now."""
        if self._source not in ("auto", "last_round") or isinstance(state["tokens"], str):  # of 0.2, as base64
            return
        tokens = typed(np.ndarray, state["tokens"])
        if (tokens.dtype, tokens.ndim) != (np.int32, 1):
            raise ValueError(f"the tokens of answers are an array {tokens.dtype}{list(tokens.shape)}")
        self._answers, self._agreement, self._kept = {}, {}, len(tokens)
        begin = 0
        kept = typed(list[tuple[Any, list[int], tuple[int, int]]], json.loads(state["kept"]))
        if min((length for _, lengths, _ in kept for length in lengths), default=0) < 0:
            raise ValueError("an answer has fewer than 0 tokens")
        for key, lengths, (compared, right) in kept:
            hashable = _hashable(key)
            self._answers[hashable] = []
            for length in lengths:
                self._answers[hashable].append(tokens[begin : begin + length])
                begin += length
            self._agreement[hashable] = (compared, right)

    def _forget(self, prompt: Hashable) -> None:
        self._kept -= sum(map(len, self._answers.pop(prompt, ())))
        self._agreement.pop(prompt, None)


def _hashable(key: Any) -> Hashable:
    """A key that JSON has made lists of tuples of."""
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFields(SamplingRules):
    """The fields of sampling that a configuration has."""

    BLOCK: ClassVar[str] = ""
    """The key of the configuration block, for messages; empty where the fields are at the top level."""

    max_new_tokens: int = 64
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion; null: the tokenizer's end-of-sequence and end-of-turn tokens."""
    stop: list[str] = dataclasses.field(default_factory=list)
    """Texts that end a completion, also where they straddle tokens; what is shown ends before the text."""
    drafts: DraftSource = "none"
    """Guess tokens and verify many of them in a step, where that is faster: ``last_round``, the last answers to the
    same prompt; ``ngram``, what followed the last tokens in prompt and answers before; ``auto``, both; ``none``. The
    tokens stay what they are, up to a near-tie that rounding decides (docs/speed.md)."""

    def sampling_params(self, stop_ids: tuple[int, ...], round_: int = 0) -> SamplingParams:
        """The sampling parameters of every prompt of a round.

        Args:
            stop_ids: The tokenizer's stop tokens, used where ``stop_token_ids`` is null.
            round_: The round's number, which is added to the seed.

        Raises:
            ConfigError: A value is out of its range.
        """
        rules: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingRules)}
        return SamplingParams(
            **rules | {"seed": self.seed + round_},
            stop_token_ids=stop_ids if self.stop_token_ids is None else tuple(self.stop_token_ids),
            stop=tuple(self.stop),
        )

    def check_sampling(self) -> None:
        """Check the fields, and that each of them has an effect.

        Raises:
            ConfigError: A value is out of its range, or would do nothing beside another one.
        """
        prefix = f"{self.BLOCK}." if self.BLOCK else ""
        for name in self.FILTERS:
            if self.temperature == 0 and self.is_set(name):
                raise ConfigError(
                    f"{prefix}{name} is {getattr(self, name)} and temperature is 0, which is greedy: {name} would do "
                    f"nothing. Set temperature to more than 0, or remove {name}."
                )
        for name in ("min_tokens", "stop_token_ids"):
            if self.ignore_eos and (value := getattr(self, name)):
                raise ConfigError(
                    f"{prefix}{name} is {value} and ignore_eos is true: no stop token ends an answer, so {name} would "
                    "do nothing. Remove one of the two."
                )
        try:
            check_named_filters(self.sampling_params(()).filter_values())
        except LockstepError as error:
            raise self.located(error) from None

    def located(self, error: LockstepError) -> LockstepError:
        """An error with the key of this block before its message."""
        return type(error)(f"{self.BLOCK}: {error}") if self.BLOCK else error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBlock(SamplingFields, CapacityFields):
    """A configuration block that samples with an engine of its own."""

    def engine_config(self, dtype: str | None, max_seq_len: int | None = None) -> EngineConfig:
        """The engine's part of the block: every field that has the name of one of `EngineConfig`.

        Args:
            dtype: The floating dtype to decode in; None: the dtype of the parameters.
            max_seq_len: The number of tokens of prompt and completion together; None: the block's own
                ``max_seq_len``, where it has one.

        Raises:
            ConfigError: A value is out of its range.
        """
        names = [field.name for field in dataclasses.fields(EngineConfig) if hasattr(self, field.name)]
        values: dict[str, Any] = {name: getattr(self, name) for name in names} | {"dtype": dtype}
        if max_seq_len is not None:
            values["max_seq_len"] = max_seq_len
        return EngineConfig(**values)

    def check_sampling(self) -> None:
        """Check the fields of sampling and those of the engine.

        Raises:
            ConfigError: A value is out of its range, or would do nothing beside another one.
        """
        super().check_sampling()
        try:
            self.engine_config(None)
        except LockstepError as error:
            raise self.located(error) from None
