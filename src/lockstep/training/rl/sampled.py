"""The answers of one sampling, whose rewards are still being computed."""

import base64
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engine.schedule import DraftCounts
from lockstep.training.rl.rollout import unpacked
from lockstep.training.rl.scoring import Scoring
from lockstep.types import Completion, FinishReason


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Answers before their rewards; the same on every host but for ``scoring`` and memory.

    Args:
        number: The number of the rollout.
        questions: The number of the question of each group.
        completions: The answers, group by group.
        scoring: What computes the rewards of this host's share.
        before: The most bytes in use on a device of this host before sampling; None where that is not known.
        after: The most bytes in use on a device of this host after sampling; None where that is not known.
        drafts: What drafts saved; None where there were none, or an earlier process sampled.
    """

    number: int
    questions: Sequence[int]
    completions: Sequence[Completion]
    scoring: Scoring
    before: int | None = None
    after: int | None = None
    drafts: DraftCounts | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the answers as JSON values, for a checkpoint; rewards are computed again after a resume."""
        packed = io.BytesIO()
        np.savez_compressed(
            packed,
            allow_pickle=False,
            ids=np.array([(each.prompt_id, each.generation_id) for each in self.completions], np.int64),
            lengths=np.array([len(each.tokens) for each in self.completions], np.int64),
            tokens=np.array([token for each in self.completions for token in each.tokens], np.int64),
            logprobs=np.array([value for each in self.completions for value in each.logprobs], np.float64),
            sampled=np.array([value for each in self.completions for value in each.sampled_logprobs], np.float64),
        )
        return {
            "number": self.number,
            "questions": list(self.questions),
            "finish_reasons": [each.finish_reason.value for each in self.completions],
            "completions": base64.b64encode(packed.getvalue()).decode(),
        }


def completions_from_json(values: Mapping[str, Any]) -> list[Completion]:
    """Return the answers that `Sampled.to_json` packed, bit for bit.

    Args:
        values: What it returned.
    """
    arrays = unpacked(values["completions"])
    ends = np.cumsum(arrays["lengths"])
    tokens, logprobs, sampled = (
        [part.tolist() for part in np.split(arrays[name], ends[:-1])] for name in ("tokens", "logprobs", "sampled")
    )
    return [
        Completion(
            prompt_id=int(prompt),
            generation_id=int(generation),
            tokens=tuple(tokens[place]),
            logprobs=tuple(logprobs[place]),
            sampled_logprobs=tuple(sampled[place]),
            finish_reason=FinishReason(values["finish_reasons"][place]),
        )
        for place, (prompt, generation) in enumerate(arrays["ids"])
    ]
