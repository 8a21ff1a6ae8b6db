"""Whether a pattern is found in an answer."""

import dataclasses

from lockstep.errors import ConfigError
from lockstep.report import Pattern, Row
from lockstep.text import Prompt
from lockstep.training.rl.rewards.config import Reward, RewardConfig


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
        compiled(self.label, self.pattern, multiline=True)

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        pattern = compiled(self.label, self.pattern, multiline=True)

        def regex(row: Row, prompt: Prompt) -> float:
            return float(pattern.is_in(row.generated_text))

        return regex


def compiled(label: str, pattern: str, *, multiline: bool = False, dot_all: bool = False) -> Pattern:
    """Return a compiled expression.

    Args:
        label: The name of the component, for the error.
        pattern: The expression.
        multiline: Whether ``^`` and ``$`` match at every line.
        dot_all: Whether ``.`` matches a newline too.

    Raises:
        ConfigError: It is not one.
    """
    try:
        return Pattern(pattern, multiline=multiline, dot_all=dot_all)
    except ConfigError as error:
        raise ConfigError(f"rewards: {label}.pattern: {error}") from None
