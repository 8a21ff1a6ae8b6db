"""What every kind of reward has in common: a weight, a value for when it fails, and a name."""

import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Literal

import draccus

from lockstep.errors import ConfigError
from lockstep.report import Row
from lockstep.text import Prompt

type Reward = Callable[[Row, Prompt], float | Awaitable[float]]
"""A function of an answer and its question that returns a number, or a coroutine that does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(draccus.PluginRegistry, discover_packages_path="lockstep.training.rl.rewards"):
    """One component of the reward: ``type: gsm8k | exact_match | format | function | length | overlong | regex``.

    Raises:
        ConfigError: A value is out of its range.
    """

    SHAPING: ClassVar[bool] = False
    """Whether it judges the form of an answer, such as its length, and not whether the answer is right."""

    weight: float = 1.0
    """What the component is multiplied by in the sum; negative to punish; 0 to log it only."""
    default: float = 0.0
    """The value of an answer for which the component raises, returns no number or is late; such answers are counted."""
    on_failure: Literal["default", "drop_group"] = "default"
    """What becomes of such an answer: it has ``default``; or nothing is learned from the answers to its question."""
    name: str | None = None
    """The name in metrics and tables; null: the type's, or the function's."""

    def __post_init__(self) -> None:
        for field in ("weight", "default"):
            if not math.isfinite(getattr(self, field)):
                raise ConfigError(f"rewards: {self.label}.{field} is {getattr(self, field)}; it must be finite.")

    @property
    def label(self) -> str:
        """The name in metrics and tables, before equal ones are numbered."""
        return self.name or self.get_choice_name(type(self))

    def check_answer(self, answer: str) -> None:
        """Check a reference answer, before training begins.

        Args:
            answer: The answer of one record.

        Raises:
            BadRow: The component cannot compare with it.
        """

    def build(self, max_new_tokens: int) -> Reward:
        """Return the function; modules of the user's are imported.

        Args:
            max_new_tokens: The number of tokens that an answer may have.

        Raises:
            ConfigError: There is no such function, or the settings do not go together.
        """
        raise NotImplementedError


def labels(rewards: Sequence[RewardConfig]) -> list[str]:
    """Return the name of each component; further ones of a name are numbered: ``regex``, ``regex_2``.

    Args:
        rewards: The components.
    """
    found: list[str] = []
    for reward in rewards:
        label, number = reward.label, 1
        while label in found:
            number += 1
            label = f"{reward.label}_{number}"
        found.append(label)
    return found


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Check that there is something to learn from.

    Args:
        rewards: The components.

    Raises:
        ConfigError: There is no component with a weight.
    """
    if not any(reward.weight for reward in rewards):
        given = "is empty" if not rewards else "has weights of 0 only"
        raise ConfigError(f"rewards {given}: nothing could be learned. Use e.g. [{{type: gsm8k}}].")
