"""How far a scheduler is."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """What drafts saved.

    Args:
        tokens: The number of sampled tokens.
        steps: The number of steps that sampled them, counted once for each sequence.
        drafted: The number of tokens for which there was a draft.
        right: The number of those that were as drafted.
    """

    tokens: int
    steps: int
    drafted: int
    right: int

    @classmethod
    def sum(cls, counts: "Iterable[DraftCounts]") -> "DraftCounts":
        """Returns the counts of all together."""
        total = [0, 0, 0, 0]
        for each in counts:
            total = [a + b for a, b in zip(total, dataclasses.astuple(each), strict=True)]
        return cls(tokens=total[0], steps=total[1], drafted=total[2], right=total[3])

    def metrics(self) -> dict[str, float]:
        """Returns the same under the names that a tracker gets, without the prefix."""
        return {
            "drafts/accepted_share": self.right / self.drafted if self.drafted else 0.0,
            "drafts/steps_saved": self.tokens - self.steps,
            "drafts/tokens_per_step": self.tokens / self.steps if self.steps else 0.0,
        }

    def __str__(self) -> str:
        share = self.right / self.drafted if self.drafted else 0.0
        return f"{share:.0%} right, {self.tokens - self.steps:,} of {self.tokens:,} steps saved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The progress of a scheduler, answers that were taken from it included.

    Args:
        finished: The number of finished sequences.
        tokens: The number of tokens sampled by each replica, those of unfinished sequences included.
        pages: The number of pages in use, over all replicas.
        max_pages: The number of pages that can be used, over all replicas.
        steps: The number of steps that sampled those tokens, counted once for each sequence; fewer than tokens where
            drafts were verified.
        drafted: The number of tokens for which there was a draft.
        right: The number of those that were as drafted.
    """

    finished: int
    tokens: tuple[int, ...]
    pages: int
    max_pages: int
    steps: int = 0
    drafted: int = 0
    right: int = 0

    @property
    def of_drafts(self) -> DraftCounts:
        """What drafts saved so far."""
        return DraftCounts(tokens=sum(self.tokens), steps=self.steps, drafted=self.drafted, right=self.right)
