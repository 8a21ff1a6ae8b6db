"""Answers by the question that they answer, with their rewards."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from lockstep.training.grpo.rewarding import Rewards
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
    def signal(self) -> Bool[np.ndarray, " group"]:
        """Whether the answers of a group have different rewards, so that something can be learned from them."""
        return np.ptp(self.totals, axis=1) > 0

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
        )
        completions = [completion for part in parts for completion in part.completions]
        return cls(
            questions=np.concatenate([part.questions for part in parts]), completions=completions, rewards=rewards
        )


def choose_groups(parts: Sequence[Groups], wanted: int) -> Groups:
    """Return the first groups with a signal; where they are too few, the first without one fill up.

    Args:
        parts: The samplings, at least one; together they have at least as many groups as wanted.
        wanted: The number of groups.
    """
    everything = Groups.concatenate(parts)
    if len(parts) == 1:
        return everything
    order = np.argsort(~everything.signal, kind="stable")[:wanted]
    return everything.take(sorted(int(place) for place in order))
