"""Answers by the question that they answer, with their rewards."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from lockstep.training.objectives.grpo import differ
from lockstep.training.rl.rewarding import Rewards
from lockstep.types import Completion


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Groups of answers, all of the same size, one after the other.

    Args:
        questions: The number of the question of each group.
        completions: The answers, group by group.
        rewards: The rewards of the answers, in the same order.
    """

    questions: Int[np.ndarray, " group"]
    completions: Sequence[Completion]
    rewards: Rewards

    @property
    def size(self) -> int:
        """The number of answers of a group."""
        return len(self.completions) // len(self.questions)

    @property
    def totals(self) -> Float[np.ndarray, "group answer"]:
        """The rewards by group."""
        return self.rewards.total.reshape(len(self.questions), -1)

    @property
    def dropped(self) -> Bool[np.ndarray, " group"]:
        """Whether nothing is learned from a group, because a reward failed or was late."""
        if self.rewards.dropped is None:
            return np.zeros(len(self.questions), bool)
        found: Bool[np.ndarray, " group"] = self.rewards.dropped.reshape(len(self.questions), -1).any(axis=1)
        return found

    @property
    def signal(self) -> Bool[np.ndarray, " group"]:
        """Whether something can be learned from a group: its answers have different rewards, and it is not dropped."""
        return differ(self.totals) & ~self.dropped

    @property
    def mixed(self) -> Bool[np.ndarray, " group"]:
        """Whether the answers of a group are not equally right, which dynamic sampling looks for; none is dropped."""
        judged = self.rewards.total if self.rewards.judged is None else self.rewards.judged
        return differ(judged.reshape(len(self.questions), -1)) & ~self.dropped

    def take(self, chosen: Sequence[int]) -> "Groups":
        """Return some of the groups.

        Args:
            chosen: Their places.
        """
        places = (np.asarray(chosen)[:, None] * self.size + np.arange(self.size)).reshape(-1)
        rewards = dataclasses.replace(
            self.rewards,
            total=self.rewards.total[places],
            components={name: values[places] for name, values in self.rewards.components.items()},
            judged=None if self.rewards.judged is None else self.rewards.judged[places],
            dropped=None if self.rewards.dropped is None else self.rewards.dropped[places],
        )
        completions = [self.completions[int(place)] for place in places]
        return Groups(questions=self.questions[np.asarray(chosen)], completions=completions, rewards=rewards)

    @classmethod
    def concatenate(cls, parts: Sequence["Groups"]) -> "Groups":
        """Return all groups of several samplings in one.

        Args:
            parts: The samplings, at least one, with the same components.
        """
        failed, late = collections.Counter[str](), collections.Counter[str]()
        for part in parts:
            failed.update(part.rewards.failed)
            late.update(part.rewards.late)
        rewards = Rewards(
            total=np.concatenate([part.rewards.total for part in parts]),
            components={
                name: np.concatenate([part.rewards.components[name] for part in parts])
                for name in parts[0].rewards.components
            },
            failed=dict(failed),
            late=dict(late),
            judged=_joined([part.rewards.judged for part in parts]),
            dropped=_joined([part.rewards.dropped for part in parts]),
        )
        completions = [completion for part in parts for completion in part.completions]
        return cls(
            questions=np.concatenate([part.questions for part in parts]), completions=completions, rewards=rewards
        )


def choose_groups(parts: Sequence[Groups], wanted: int) -> Groups:
    """Return the first groups whose answers are not equally right; where they are too few, the first others fill up,
    dropped ones last.

    Args:
        parts: The samplings, at least one; together they have at least as many groups as wanted.
        wanted: The number of groups.
    """
    everything = Groups.concatenate(parts)
    if len(parts) == 1:
        return everything
    order = np.argsort(~everything.mixed + 1 * everything.dropped, kind="stable")[:wanted]
    return everything.take(sorted(int(place) for place in order))


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """One array of all; None where a part has none."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None
