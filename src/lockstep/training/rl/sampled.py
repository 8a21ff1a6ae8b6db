"""The answers of a rollout before their rewards, and as a checkpoint keeps them."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engine.schedule import DraftCounts
from lockstep.json_text import typed
from lockstep.training.rl.conversations import Conversation
from lockstep.training.rl.rewarding import Rewards, Scoring
from lockstep.types import Completion, FinishReason, RoutedExperts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Answers before their rewards; the same on every host but for ``scoring`` and memory.

    Args:
        before: The most bytes in use on a device of this host before sampling; None where that is not known.
        after: The most bytes in use on a device of this host after sampling; None where that is not known.
    """

    number: int
    questions: Sequence[int]  # number of the question of each group
    completions: Sequence[Completion]  # the answers, group by group
    scoring: Scoring | None  # what computes the rewards of this host's share; None where environments have rewarded
    before: int | None = None
    after: int | None = None
    drafts: DraftCounts | None = None  # what drafts saved; None where there were none, or an earlier process sampled
    conversations: Sequence[Conversation] | None = None  # those that the answers are of; None with single turns
    rewards: Rewards | None = None  # those of environments
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # figures of the conversations

    def state(self) -> dict[str, Any]:
        """Return the answers, for a checkpoint; rewards are computed again after a resume."""
        completions = self.completions

        def joined(values: Iterable[Sequence[float]], dtype: type) -> np.ndarray:
            return np.array(list(itertools.chain.from_iterable(values)), dtype)

        return {
            "number": self.number,
            "questions": list(self.questions),
            "finish_reasons": [completion.finish_reason.value for completion in completions],
            "completions": {
                "ids": np.array([(answer.prompt_id, answer.generation_id) for answer in completions], np.int64),
                "lengths": np.array([len(answer.tokens) for answer in completions], np.int64),
                "tokens": joined((answer.tokens for answer in completions), np.int64),
                "logprobs": joined((answer.logprobs for answer in completions), np.float64),
                "sampled": joined((answer.sampled_logprobs for answer in completions), np.float64),
                **_packed_routing([answer.routed_experts for answer in completions]),
            },
        }


def completions_of(state: Mapping[str, Any]) -> list[Completion]:
    """Return the answers of `Sampled.state`, bit for bit."""
    arrays = typed(dict[str, np.ndarray], state["completions"])
    ends = np.cumsum(arrays["lengths"])
    tokens, logprobs, sampled = (
        [part.tolist() for part in np.split(arrays[name], ends[:-1])] for name in ("tokens", "logprobs", "sampled")
    )
    routing = _unpacked_routing(arrays, len(arrays["ids"]))
    return [
        Completion(
            prompt_id=int(prompt),
            generation_id=int(generation),
            tokens=tuple(tokens[place]),
            logprobs=tuple(logprobs[place]),
            sampled_logprobs=tuple(sampled[place]),
            finish_reason=FinishReason(state["finish_reasons"][place]),
            routed_experts=routing[place],
        )
        for place, (prompt, generation) in enumerate(arrays["ids"])
    ]


def _packed_routing(routing: Sequence[RoutedExperts | None]) -> dict[str, np.ndarray]:
    """The experts of answers as arrays; none where no answer has any."""
    if not any(routing):
        return {}
    shapes = np.array([(0, 0, 0) if experts is None else experts.shape for experts in routing], np.int64)
    packed = b"".join(experts.packed for experts in routing if experts is not None)
    return {"routing_shapes": shapes, "routing": np.frombuffer(packed, "<i2")}


def _unpacked_routing(arrays: Mapping[str, np.ndarray], count: int) -> list[RoutedExperts | None]:
    if "routing" not in arrays:
        return [None] * count
    shapes = arrays["routing_shapes"].reshape(count, 3)
    sizes = shapes.prod(axis=1)
    if sizes.sum() != arrays["routing"].size or (shapes < 0).any():
        raise ValueError("the experts of answers are not as many as said")
    parts = np.split(arrays["routing"].astype("<i2"), np.cumsum(sizes)[:-1])
    routing: list[RoutedExperts | None] = []
    for (tokens, layers, choices), part in zip(shapes.tolist(), parts, strict=True):
        routing.append(RoutedExperts((tokens, layers, choices), part.tobytes()) if part.size else None)
    return routing
