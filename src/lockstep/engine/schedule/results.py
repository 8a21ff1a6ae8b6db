"""The results of a decode launch, one array and so one transfer to the host; and the counts of a whole round."""

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float32, Int32

from lockstep.types import RoutedExperts

TOKEN, LOGPROB, SAMPLED_LOGPROB, FIRST_TOP = 0, 1, 2, 3
"""The parts of `DecodeResults.packed`. From the last on come the ids of the most probable tokens, then the bits of
their log-probabilities."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeResults:
    """The samples of every slot in a launch."""

    packed: Int32[np.ndarray, "replica part slot step"]
    """Part 0 has the token ids, -1 where a sequence had already ended. The others have the bits of float32 numbers: the
    log-probabilities of the tokens under the model, those under the distribution that they were drawn from; and where
    sequences ask for them the ids of the n most probable tokens, most probable first, and n log-probabilities; and the
    words of the experts of the position before each token (`RoutedShape`)."""

    @classmethod
    def of(
        cls,
        tokens: Int32[np.ndarray, "replica slot step"],
        logprobs: Float32[np.ndarray, "replica slot step"],
        sampled_logprobs: Float32[np.ndarray, "replica slot step"] | None = None,
        top_ids: Int32[np.ndarray, "replica slot step n"] | None = None,
        top_logprobs: Float32[np.ndarray, "replica slot step n"] | None = None,
    ) -> "DecodeResults":
        """Pack separate arrays.

        Args:
            tokens: The token ids, -1 where a sequence had already ended.
            sampled_logprobs: The log-probabilities under the distribution drawn from; None for zeros.
            top_ids: The ids of the most probable tokens; None where no sequence asks for them.
        """
        sampled = np.zeros_like(logprobs) if sampled_logprobs is None else sampled_logprobs
        parts = [tokens, logprobs, sampled]
        for top in (top_ids, top_logprobs):
            if top is not None:
                parts += list(np.moveaxis(top, -1, 0))
        return cls(packed=np.stack([np.ascontiguousarray(part).view(np.int32) for part in parts], axis=1))

    def split_steps(self) -> tuple["DecodeResults", Int32[np.ndarray, "replica slot step"]]:
        """Return the results of a launch that verifies drafts as those of decode, and the step of each token."""
        return DecodeResults(packed=self.packed[:, :-1]), self.packed[:, -1]

    @property
    def tokens(self) -> Int32[np.ndarray, "replica slot step"]:
        """The token ids, -1 where a sequence had already ended."""
        return self.packed[:, TOKEN]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedShape:
    """The experts of a token as words of 32 bits."""

    layers: int
    choices: int  # number of experts that a token is given to
    experts: int

    @property
    def dtype(self) -> np.dtype:
        """The type of a number in the words; -1 is no expert."""
        return np.dtype(np.int8 if self.experts <= 128 else np.int16)

    @property
    def words(self) -> int:
        """The number of words of a token."""
        return -(-self.layers * self.choices * self.dtype.itemsize // 4)

    def unpacked(self, words: Int32[np.ndarray, "word token"]) -> RoutedExperts:
        """Return the experts of some tokens."""
        numbers = np.ascontiguousarray(words.T).view(self.dtype)[:, : self.layers * self.choices]
        return RoutedExperts((len(numbers), self.layers, self.choices), numbers.astype("<i2").tobytes())


def as_floats(bits: Int32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Return the float32 numbers with the given bits."""
    return np.ascontiguousarray(bits).view(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """Counts of drafted tokens and of steps saved."""

    tokens: int
    steps: int  # number of steps that sampled them, counted once for each sequence
    drafted: int  # number of tokens for which there was a draft
    right: int  # number of those that were as drafted

    @classmethod
    def sum(cls, counts: "Iterable[DraftCounts]") -> "DraftCounts":
        """Return the counts of all together."""
        total = [0, 0, 0, 0]
        for each in counts:
            total = [a + b for a, b in zip(total, dataclasses.astuple(each), strict=True)]
        return cls(tokens=total[0], steps=total[1], drafted=total[2], right=total[3])

    def metrics(self) -> dict[str, float]:
        """Return the same under the names that a tracker gets, without the prefix."""
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
    """The progress of a scheduler, answers that were taken from it included."""

    finished: int
    tokens: tuple[int, ...]  # number of tokens sampled by each replica, those of unfinished sequences included
    pages: int  # number of pages in use, over all replicas
    max_pages: int  # number of pages that can be used, over all replicas
    steps: int = 0  # steps that sampled them, once for each sequence; fewer than tokens where drafts were verified
    drafted: int = 0  # number of tokens for which there was a draft
    right: int = 0  # number of those that were as drafted

    @property
    def of_drafts(self) -> DraftCounts:
        """Counts of drafts so far."""
        return DraftCounts(tokens=sum(self.tokens), steps=self.steps, drafted=self.drafted, right=self.right)
