"""Where the drafts of a request come from: earlier answers to the same prompt, kept on the host, and n-grams."""

from collections.abc import Hashable, Iterable
from typing import Literal

import numpy as np

from lockstep.types import Completion, Drafts

DraftSource = Literal["auto", "last_round", "ngram", "none"]
"""``last_round``: the last answers to the same prompt; ``ngram``: what followed the last tokens in prompt and answers
before; ``auto``: both; ``none``: plain decoding."""

MAX_TOKENS = 1 << 24
"""Tokens of earlier answers that a host keeps at most, 64 MiB; those that were kept longest ago go first."""


class EarlierAnswers:
    """The last answers to each prompt, as drafts of the next ones. To lose them costs time and changes no token.

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

    def _forget(self, prompt: Hashable) -> None:
        self._kept -= sum(map(len, self._answers.pop(prompt, ())))
        self._agreement.pop(prompt, None)
