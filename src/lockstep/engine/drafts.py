"""Drafts of a request: earlier answers to the same prompt, kept on the host, and n-grams."""

import base64
import json
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from lockstep.json_text import typed
from lockstep.types import Completion, Drafts

DraftSource = Literal["auto", "last_round", "ngram", "none"]
"""``last_round``: the last answers to the same prompt; ``ngram``: what followed the last tokens in prompt and answers
before; ``auto``: both; ``none``: plain decoding."""

MAX_TOKENS = 1 << 24
"""Tokens of earlier answers that a host keeps at most, 64 MiB; those that were kept longest ago go first."""


class EarlierAnswers:
    """The last answers to each prompt, as drafts of the next ones.

    To lose them changes no token, but which programs sample them, and so the last bits of log-probabilities: a run that
    goes on needs them.

    Args:
        source: Where drafts come from.
        max_tokens: The most tokens to keep.
    """

    def __init__(self, source: DraftSource, max_tokens: int = MAX_TOKENS) -> None:
        self._source, self._max_tokens = source, max_tokens
        self._answers: dict[Hashable, list[np.ndarray]] = {}
        self._agreement: dict[Hashable, tuple[int, int]] = {}
        self._kept = 0

    def drafts(self, prompt: Hashable) -> Drafts | None:
        """Returns the drafts of a request; None where there are to be none, and so no programs that verify them.

        Args:
            prompt: What tells the prompt from all others.
        """
        if self._source == "none":
            return None
        answers = tuple(tuple(answer.tolist()) for answer in self._answers.get(prompt, ()))
        compared, right = self._agreement.get(prompt, (0, 0))
        return Drafts(answers=answers, ngrams=self._source in ("auto", "ngram"), compared=compared, right=right)

    def keep(self, prompt: Hashable, completions: Iterable[Completion]) -> None:
        """Keeps the answers to a prompt in place of those before, and how many of their tokens are the same.

        Args:
            prompt: What tells the prompt from all others.
            completions: The answers in the order of the generations.
        """
        if self._source not in ("auto", "last_round"):
            return
        before = self._answers.get(prompt, [])
        self._forget(prompt)
        answers = [np.array(completion.tokens, np.int32) for completion in completions]
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
        """Returns what is kept now, whatever is kept later."""
        copied = EarlierAnswers(self._source, self._max_tokens)
        copied._answers, copied._agreement = dict(self._answers), dict(self._agreement)
        copied._kept = self._kept
        return copied

    def state(self) -> dict[str, Any]:
        """Returns what is kept as JSON values, for a checkpoint: 5.4 bytes per token."""
        kept = [(key, [len(each) for each in answers], self._agreement[key]) for key, answers in self._answers.items()]
        tokens = np.concatenate([np.zeros(0, "<i4"), *(each for answers in self._answers.values() for each in answers)])
        return {"kept": json.dumps(kept), "tokens": base64.b64encode(tokens.astype("<i4").tobytes()).decode()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Keeps what `state` returned in an earlier process; nothing where no earlier answers are wanted now.

        Args:
            state: That state.
        """
        if self._source not in ("auto", "last_round"):
            return
        tokens = np.frombuffer(base64.b64decode(state["tokens"]), "<i4").astype(np.int32)
        self._answers, self._agreement, self._kept = {}, {}, len(tokens)
        begin = 0
        kept = typed(list[tuple[Any, list[int], tuple[int, int]]], json.loads(state["kept"]))
        if min((each for _, lengths, _ in kept for each in lengths), default=0) < 0:
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
