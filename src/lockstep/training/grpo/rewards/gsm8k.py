"""Whether an answer ends in the right number."""

import dataclasses

from lockstep.report import Row, load_metric
from lockstep.text import Prompt
from lockstep.training.grpo.rewards.config import Reward, RewardConfig


@RewardConfig.register_subclass("gsm8k")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gsm8kReward(RewardConfig):
    r"""1 where the number after ``####``, else in the last ``\boxed{}``, else the last number of the answer is that of
    the reference answer; else 0 (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168).
    """

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        metric = load_metric("gsm8k")

        def gsm8k(row: Row, prompt: Prompt) -> float:
            value = metric(row, prompt)
            assert value is not None, "every question has a reference answer"
            return value

        return gsm8k
