"""Rewards: functions of an answer and its question."""

import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final, Literal

import draccus

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError
from lockstep.plugins import OpenRegistry, load_object
from lockstep.report import (
    NO_SCORES,
    OPEN_METRICS,
    Pattern,
    Row,
    content,
    exact_match,
    last_number,
    load_metric,
    math_expressions,
)
from lockstep.text import Prompt
from lockstep.training.data.records import BadRow

type Reward = Callable[[Row, Prompt], float | Awaitable[float | None] | None]
"""A function of an answer and its question that returns a number, or a coroutine that does; None is a failure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(OpenRegistry, draccus.ChoiceRegistry):
    """One component of the reward: ``type: gsm8k | exact_match | format | function | length | math_verify | model |
    overlong | regex``, or ``my_module:MyReward`` for a subclass of your own.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Brevity(lockstep.training.RewardConfig):
        ...     most: int
        ...
        ...     def build(self, max_new_tokens):
        ...         return lambda row, prompt: float(len(row.generated_text) <= self.most)
        ...
        >>> Brevity(most=20, weight=0.5).label
        'Brevity'
    """

    ON_DEVICES: ClassVar[bool] = False
    """Whether every host computes it together, by a program, and there is no function."""
    SHAPING: ClassVar[bool] = False
    """Whether it judges the form of an answer, such as its length, and not whether the answer is right."""

    weight: float = 1.0
    """The factor of the component in the sum; negative to punish; 0 to log it only."""
    default: float = 0.0
    """The value of an answer for which the component raises, returns no number or is late; such answers are counted."""
    on_failure: Literal["default", "drop_group"] = "default"
    """The treatment of such an answer: it has ``default``; or nothing is learned from the answers to its question."""
    name: str | None = None
    """The name in metrics and tables; null: the type's, or the function's."""

    def __post_init__(self) -> None:
        check_fields(self, "rewards: ")
        for field in ("weight", "default"):
            if not math.isfinite(getattr(self, field)):
                raise ConfigError(f"rewards: {self.label}.{field} is {getattr(self, field)}; it must be finite.")

    @property
    def label(self) -> str:
        """The name in metrics and tables, before equal ones are numbered."""
        return self.name or self.get_choice_name(type(self)).rpartition(":")[2]

    def check_answer(self, answer: str) -> None:
        """Check a reference answer, before training begins."""

    def build(self, max_new_tokens: int) -> Reward:
        """Return the function; modules of the user's are imported."""
        raise NotImplementedError


def labels(rewards: Sequence[RewardConfig]) -> list[str]:
    """Return the name of each component; further ones of a name are numbered: ``regex``, ``regex_2``."""
    names: list[str] = []
    for reward in rewards:
        label, number = reward.label, 1
        while label in names:
            number += 1
            label = f"{reward.label}_{number}"
        names.append(label)
    return names


TOTAL: Final = "reward"
"""The name of the sum of all components in the rows of answers."""


def check_rewards(rewards: Sequence[RewardConfig], *, taught: bool = False) -> None:
    """Check that there is something to learn from, and that no component has the name of another column.

    Args:
        taught: Whether a teacher is learned from too, so that rewards may be for the eye alone.
    """
    if not rewards or not (taught or any(reward.weight for reward in rewards)):
        state = "is empty" if not rewards else "has weights of 0 only"
        raise ConfigError(f"rewards {state}: nothing could be learned. Use e.g. [{{type: gsm8k}}].")
    for label in labels(rewards):
        if label == TOTAL or label in NO_SCORES:
            has = "the sum of all components" if label == TOTAL else "another value"
            raise ConfigError(
                f"rewards: a component is called {label!r}, the name that rows of answers have for {has}; it must be "
                f"none of {', '.join(sorted({TOTAL, *NO_SCORES}))}. Give it another name, such as name: my_{label}."
            )


@RewardConfig.register_subclass("exact_match")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactMatchReward(RewardConfig):
    """1 where the final answer is that of the reference as text, but for space around it; else 0: the rest of the line
    after the last ``####``, else as many first lines as the reference has, without the reasoning before them.
    """

    ignore_case: bool = False
    """Whether upper and lower case are the same."""

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        return functools.partial(exact_match, ignore_case=self.ignore_case)


@RewardConfig.register_subclass("function")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionReward(RewardConfig):
    """The value of a metric, or of a function of an importable module for (row, prompt), which may be ``async``.

    Raises:
        ConfigError: ``function`` is neither.
    """

    function: str
    """A metric that needs no reference answer, such as ``repetition``; or ``module:function``, a module beside the
    configuration or on ``PYTHONPATH``, on every host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        module, colon, function = self.function.partition(":")
        if self.function not in OPEN_METRICS and not (module and colon and function):
            raise ConfigError(
                f"rewards: function is {self.function!r}; it must be module:function, such as my_rewards:judge, or "
                f"one of {', '.join(OPEN_METRICS)}."
            )

    @property
    def label(self) -> str:
        """The name of the function, where no other is given."""
        return self.name or self.function.rpartition(":")[2]

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        function: Reward = OPEN_METRICS.get(self.function) or load_object(self.function, "reward")
        return function


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
        return load_metric("gsm8k")


@RewardConfig.register_subclass("math_verify")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MathVerifyReward(RewardConfig):
    """1 where math-verify finds the answer's expression equal to that of the reference answer, else 0. It needs the
    extra ``math`` (https://github.com/huggingface/Math-Verify).
    """

    def check_answer(self, answer: str) -> None:
        """See `RewardConfig.check_answer`."""
        load_metric("math_verify")
        if not math_expressions(answer):
            raise BadRow(f"has the answer {answer[-80:]!r}, which has no expression for the reward {self.label}")

    def build(self, max_new_tokens: int) -> Reward:
        """See `RewardConfig.build`."""
        return load_metric("math_verify")


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


@RewardConfig.register_subclass("format")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatReward(RewardConfig):
    """1 where the whole answer, reasoning and markers included, matches a regular expression of Python; else 0.

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


@RewardConfig.register_subclass("regex")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RegexReward(RewardConfig):
    """1 where a regular expression of Python is found in the final answer, without the reasoning before it; else 0.

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
            return float(pattern.is_in(content(row)))

        return regex


def compiled(label: str, pattern: str, *, multiline: bool = False, dot_all: bool = False) -> Pattern:
    """Return a compiled expression."""
    try:
        return Pattern(pattern, multiline=multiline, dot_all=dot_all)
    except ConfigError as error:
        raise ConfigError(f"rewards: {label}.pattern: {error}") from None
