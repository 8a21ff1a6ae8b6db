"""How long an answer is."""

import dataclasses
from typing import ClassVar

from lockstep.report import Row
from lockstep.text import Prompt
from lockstep.training.rl.rewards.config import Reward, RewardConfig


@RewardConfig.register_subclass("length")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthReward(RewardConfig):
    """The number of tokens of the answer as a share of ``rollout.max_new_tokens``: 0 to 1. A negative weight asks for
    short answers.
    """

    SHAPING: ClassVar[bool] = True

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""

        def length(row: Row, prompt: Prompt) -> float:
            return row.num_tokens / max_new_tokens

        return length
