"""Whether a pattern is found in an answer."""

import dataclasses
import re

from lockstep.errors import ConfigError
from lockstep.report import Row
from lockstep.text import Prompt
from lockstep.training.grpo.rewards.config import Reward, RewardConfig


@RewardConfig.register_subclass("regex")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RegexReward(RewardConfig):
    """1 where a regular expression of Python is found in the answer; else 0.

    Raises:
        ConfigError: The pattern is not a regular expression.
    """

    pattern: str
    """The expression; ``^`` and ``$`` match at every line."""

    def __post_init__(self) -> None:
        super().__post_init__()
        compiled(self.label, self.pattern, re.MULTILINE)

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        pattern = compiled(self.label, self.pattern, re.MULTILINE)

        def regex(row: Row, prompt: Prompt) -> float:
            return float(pattern.search(row.generated_text) is not None)

        return regex


def compiled(label: str, pattern: str, flags: re.RegexFlag) -> re.Pattern[str]:
    """Return a compiled expression.

    Args:
        label: The name of the component, for the error.
        pattern: The expression.
        flags: The flags of the expression.

    Raises:
        ConfigError: It is not one.
    """
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(
            f"rewards: {label}.pattern is {pattern!r}, which is not a regular expression of Python ({error}). "
            "Correct it."
        ) from None
