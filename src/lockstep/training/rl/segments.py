"""A sample of training as segments: what the model was given to read, and what it said, in turn."""

import dataclasses
from collections.abc import Sequence

from lockstep.types import Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens of one speaker.

    Args:
        completion: The answer that the model sampled, with the log-probability that each token was drawn with; None for
            what it was given to read, from which nothing is learned.
    """

    tokens: tuple[int, ...]
    completion: Completion | None = None


type Sample = Sequence[Segment]
"""The segments of a row in order, all sampled by one state of the model. That of a single turn has two: prompt, answer.
"""


def single_turn(prompt: tuple[int, ...], completion: Completion) -> Sample:
    """Return a prompt and its answer as a sample."""
    return (Segment(tokens=prompt), Segment(tokens=completion.tokens, completion=completion))
