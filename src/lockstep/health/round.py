"""The health of all answers of a round, and the share of them in each state."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from lockstep.health.answer import AnsweredPrompt, Health, State, Vocabulary, measure_health

SAME_TOKENS: Final = 8
"""Tokens that an answer to several prompts has at least: many a question has the answer "Yes"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A part of some answers.

    Example:
        >>> print(lockstep.health.Share(count=10, total=32))
        10 of 32 answers (31 %)
    """

    count: int
    total: int

    @property
    def value(self) -> float:
        """The part, from 0 to 1; 0 of no answers."""
        return self.count / self.total if self.total else 0.0

    @property
    def percent(self) -> str:
        """The part in percent, as text."""
        percent = 100 * self.value
        return f"{percent:.{int(percent < 10 and percent != int(percent))}f} %"

    def __str__(self) -> str:
        return f"{self.count:,} of {self.total:,} answers ({self.percent})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundHealth:
    """The health of a round.

    Args:
        answers: The health of each answer, in the order in which they were given.
        shares: The answers in each state, by the name of the state; all states, in the order of `State`.
    """

    answers: tuple[Health, ...]
    shares: Mapping[str, Share]

    def scalars(self) -> dict[str, float]:
        """The share of each state as ``health/STATE``; none where there is no answer."""
        return {f"health/{state}": share.value for state, share in self.shares.items() if share.total}


def measure_round(answers: Sequence[AnsweredPrompt], vocabulary: Vocabulary) -> RoundHealth:
    """The health of the answers of a round, ``same_answer`` included."""
    measured = [measure_health(answer, vocabulary) for answer in answers]
    prompts: dict[str, set[str]] = {}
    for answer in answers:
        prompts.setdefault(answer.text.strip(), set()).add(answer.prompt.shown)
    for place, (answer, health) in enumerate(zip(answers, measured, strict=True)):
        text = answer.text.strip()
        if text and len(answer.completion.tokens) >= SAME_TOKENS and len(prompts[text]) > 1:
            measured[place] = dataclasses.replace(health, states=(*health.states, State.SAME_ANSWER))
    return RoundHealth(answers=tuple(measured), shares=shares(measured))


def shares(measured: Sequence[Health]) -> dict[str, Share]:
    """The answers in each state, see `RoundHealth`."""
    return {
        state.value: Share(count=sum(state in health.states for health in measured), total=len(measured))
        for state in State
    }
