"""An alarm of a state of answers, and the states that alarms are found in."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Self

from lockstep.health.answer import Share
from lockstep.json_text import typed

ALL: Final = ""
"""The group of all prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptStates:
    """The states of the answers to one prompt in a round.

    Args:
        prompt: The identity of the prompt from round to round.
        answers: The states of each answer, in the order of its generations; at least one answer.
        groups: The groups that the prompt belongs to.
    """

    prompt: str
    answers: Sequence[Collection[str]]
    groups: Sequence[str] = ()

    def count(self, state: str) -> int:
        """The number of its answers that are in a state."""
        return sum(state in answer for answer in self.answers)

    def share(self, state: str) -> float:
        """The share of its answers that are in a state."""
        return self.count(state) / len(self.answers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alarm:
    """A state of answers that is more frequent than before.

    Args:
        step: The step of the round that showed it.
        began: The step of the first round that had it.
        before: Its share in the rounds before ``began``; None where it was there from the first round.
        now: Its share in the rounds since ``began``.
        group: The prompts that have it more often than the others; empty where no group tells.
        inside: Its share among these since ``began``; None without a group.
        outside: Its share among the others; None without a group.
        prompts: The numbers of some prompts whose answers are in the state, those of the group first.

    Example:
        >>> from lockstep.health import Share
        >>> before, now = Share(count=4, total=256), Share(count=10, total=32)
        >>> print(lockstep.health.Alarm(step=6250, state="loop", began=6200, before=before, now=now))
        step 6,250: loop in 10 of 32 answers (31 %), before in 4 of 256 answers (1.6 %); since step 6,200
    """

    step: int
    state: str
    began: int
    before: Share | None
    now: Share
    group: str = ALL
    inside: Share | None = None
    outside: Share | None = None
    prompts: tuple[str, ...] = ()

    def __str__(self) -> str:
        before = "" if self.before is None else f", before in {self.before}"
        where = ""
        if self.inside is not None and self.outside is not None:
            where = f"; {self.group} {self.inside.percent}, others {self.outside.percent}"
        since = "the first round, " * (self.before is None) + f"step {self.began:,}"
        return f"step {self.step:,}: {self.state} in {self.now}{before}{where}; since {since}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The alarm that `dataclasses.asdict` was called on, by way of JSON."""
        return typed(cls, dict(values))
