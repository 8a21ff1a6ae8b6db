"""Whether an answer as a whole has the form that was asked for."""

import dataclasses
from typing import ClassVar

from lockstep.report import Row
from lockstep.text import Prompt
from lockstep.training.rl.rewards.config import Reward, RewardConfig
from lockstep.training.rl.rewards.regex import compiled


@RewardConfig.register_subclass("format")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatReward(RewardConfig):
    """1 where the whole answer matches a regular expression of Python; else 0.

    Raises:
        ConfigError: The pattern is not a regular expression.
    """

    SHAPING: ClassVar[bool] = True

    pattern: str = r".*\n?####\s*\S[^\n]*\s*"
    """The expression; ``.`` matches a newline too. The default asks for a last line ``#### final answer``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        compiled(self.label, self.pattern, dot_all=True)

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        pattern = compiled(self.label, self.pattern, dot_all=True)

        def well_formed(row: Row, prompt: Prompt) -> float:
            return float(pattern.is_all_of(row.generated_text))

        return well_formed
