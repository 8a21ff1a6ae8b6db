"""Guesses by look-up: what followed the last tokens of an answer where they were before."""

import itertools
from collections.abc import Sequence as Seq
from typing import Final

_SIZES: Final = (3, 2)
"""Tokens that must be the same for what followed them to be a guess, the longest first."""

type _Places = dict[tuple[int, ...], int]
"""The place after each n-gram, where it was last."""


class Ngrams:
    """The texts of one request, a prompt and its answers so far, in which the last tokens of an answer are looked up.

    Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), in the other answers
    too. Each token is indexed once, so that a guess takes no longer in a long text than in a short one.
    """

    def __init__(self, prompt: Seq[int], generations: int) -> None:
        self._prompt = prompt
        self._of_prompt: _Places | None = None
        # An answer goes on from the end of the prompt: its first token has tokens before it, too.
        self._begin = min(len(prompt), _SIZES[0])
        self._texts = [list(prompt[len(prompt) - self._begin :]) for _ in range(generations)]
        self._own: list[_Places] = [{} for _ in range(generations)]
        self._everywhere: dict[tuple[int, ...], tuple[int, int]] = {}

    def add(self, generation: int, tokens: Seq[int]) -> None:
        """Append sampled tokens to an answer."""
        text, own = self._texts[generation], self._own[generation]
        for token in tokens:
            for gram in _last(text):
                own[gram] = len(text)
                self._everywhere[gram] = (generation, len(text))
            text.append(token)

    def guess(self, generation: int, count: int) -> list[int]:
        """Return at most ``count`` tokens that may follow an answer; none where its last tokens are new.

        The answer itself is looked at first, then the prompt, then the other answers. What reaches the end of the
        answer goes on from its beginning, again and again.
        """
        text = self._texts[generation]
        for gram in _last(text):
            place = self._own[generation].get(gram)
            if place is not None:
                return list(itertools.islice(itertools.cycle(text[place:]), count))
            place = self._places_in_prompt().get(gram)
            if place is not None:
                following = [*self._prompt[place : place + count], *text[self._begin :]]
                return list(itertools.islice(itertools.cycle(following), count))
            occurrence = self._everywhere.get(gram)
            if occurrence is not None:
                return self._texts[occurrence[0]][occurrence[1] : occurrence[1] + count]
        return []

    def _places_in_prompt(self) -> _Places:
        if self._of_prompt is None:
            prompt = self._prompt
            self._of_prompt = {
                tuple(prompt[place - size : place]): place for size in _SIZES for place in range(size, len(prompt))
            }
        return self._of_prompt


def _last(text: Seq[int]) -> list[tuple[int, ...]]:
    """The n-grams at the end of a text."""
    return [tuple(text[-size:]) for size in _SIZES if size <= len(text)]
