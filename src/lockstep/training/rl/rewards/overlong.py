"""DAPO's overlong reward shaping: answers are punished more and more as they near the limit."""

import dataclasses
from typing import ClassVar

from lockstep.errors import ConfigError
from lockstep.report import Row
from lockstep.text import Prompt
from lockstep.training.rl.rewards.config import Reward, RewardConfig


@RewardConfig.register_subclass("overlong")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongReward(RewardConfig):
    """0 for an answer that ends ``buffer`` tokens before the limit; from there it falls in a straight line to -1 at the
    limit (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 13).

    Raises:
        ConfigError: The buffer is not at least 1 token.
    """

    SHAPING: ClassVar[bool] = True

    buffer: int
    """The number of tokens before ``rollout.max_new_tokens`` from which on an answer is punished."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer < 1:
            raise ConfigError(f"rewards: {self.label}.buffer is {self.buffer}; it must be at least 1 token. Raise it.")

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        if self.buffer > max_new_tokens:
            raise ConfigError(
                f"rewards: {self.label}.buffer is {self.buffer} and rollout.max_new_tokens is {max_new_tokens}; it "
                f"must be at most that. Lower it to less than {max_new_tokens}."
            )

        def overlong(row: Row, prompt: Prompt) -> float:
            # An answer that was cut has exactly max_new_tokens tokens, where the line has reached -1.
            return min(0.0, (max_new_tokens - self.buffer - row.num_tokens) / self.buffer)

        return overlong
