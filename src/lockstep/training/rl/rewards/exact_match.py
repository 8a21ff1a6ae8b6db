"""Whether an answer is the reference answer, as text."""

import dataclasses

from lockstep.report import Row
from lockstep.text import Prompt
from lockstep.training.rl.rewards.config import Reward, RewardConfig

MARK = "####"
"""What GSM8K writes before a final answer."""


@RewardConfig.register_subclass("exact_match")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactMatchReward(RewardConfig):
    """1 where the final answer is that of the reference as text, but for space around it; else 0. The final answer is
    what follows the last ``####``, else the whole text.
    """

    ignore_case: bool = False
    """Whether upper and lower case are the same."""

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""

        def exact_match(row: Row, prompt: Prompt) -> float:
            assert prompt.answer is not None, "every question has a reference answer"
            given, expected = final_answer(row.generated_text), final_answer(prompt.answer)
            if self.ignore_case:
                given, expected = given.casefold(), expected.casefold()
            return float(given == expected)

        return exact_match


def final_answer(text: str) -> str:
    """Return the line after the last ``####`` of a solution; the whole text where there is no such mark.

    Args:
        text: A solution.
    """
    _, mark, after = text.rpartition(MARK)
    return (after.strip().split("\n")[0] if mark else text).strip()
