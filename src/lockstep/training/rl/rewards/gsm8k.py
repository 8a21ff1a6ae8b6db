"""Whether an answer ends in the right number."""

import dataclasses

from lockstep.report import Row, last_number, load_metric
from lockstep.text import Prompt
from lockstep.training.data.records import BadRow
from lockstep.training.rl.rewards.config import Reward, RewardConfig


@RewardConfig.register_subclass("gsm8k")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gsm8kReward(RewardConfig):
    r"""1 where the number that the answer ends in is that of the reference answer, else 0: the one after the last
    ``####`` that one follows, else in the last ``\boxed{}``, else the last (Cobbe et al. 2021,
    https://arxiv.org/abs/2110.14168).
    """

    def check_answer(self, answer: str) -> None:
        """See `RewardConfig.check_answer`."""
        if last_number(answer) is None:
            raise BadRow(f"has the answer {answer[-80:]!r}, which has no number for the reward {self.label}")

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        metric = load_metric("gsm8k")

        def gsm8k(row: Row, prompt: Prompt) -> float:
            value = metric(row, prompt)
            assert value is not None, "every question has a reference answer"
            return value

        return gsm8k
