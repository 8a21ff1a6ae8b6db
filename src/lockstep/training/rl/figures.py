"""The numbers of a rollout and of a step, under the names that a tracker gets."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from jaxtyping import Bool, Float

from lockstep.engine import PhaseClock
from lockstep.types import Completion, FinishReason


def reward_metrics(
    totals: Float[np.ndarray, "prompt answer"],
    components: Mapping[str, Float[np.ndarray, " answer"]],
    failed: Mapping[str, int],
    late: Mapping[str, int],
) -> dict[str, float]:
    """Return what the rewards of a rollout say.

    Args:
        totals: The weighted sums.
        components: The values of each component by name.
        failed: The number of answers for which a component raised or gave no number, by name.
        late: The number of answers for which it was late.
    """
    found = {
        "reward/mean": totals.mean(),
        "reward/std": totals.std(),
        "reward/min": totals.min(),
        "reward/max": totals.max(),
        "reward/failed": sum(failed.values()),
        "reward/late": sum(late.values()),
    }
    for name, values in components.items():
        found |= {
            f"reward/{name}/mean": values.mean(),
            f"reward/{name}/std": values.std(),
            f"reward/{name}/failed": failed.get(name, 0),
            f"reward/{name}/late": late.get(name, 0),
        }
    return {name: float(value) for name, value in found.items()}


def answer_metrics(
    completions: Sequence[Completion], signal: Bool[np.ndarray, " prompt"], dropped: Bool[np.ndarray, " prompt"]
) -> dict[str, float]:
    """Return what the answers of a rollout look like.

    Args:
        completions: The answers.
        signal: Whether something can be learned from the answers to a prompt.
        dropped: Whether nothing is, because a reward failed or was late.
    """
    lengths = np.array([len(each.tokens) for each in completions])
    return {
        "rollout/answer_length_mean": float(lengths.mean()),
        "rollout/answer_length_max": float(lengths.max()),
        "rollout/cut_share": float(np.mean([each.finish_reason == FinishReason.LENGTH for each in completions])),
        "rollout/groups_without_signal": float(1 - signal.mean()),
        "rollout/groups_dropped": float(dropped.mean()),
        "rollout/generated_tokens": float(lengths.sum()),
    }


class StepTimes:
    """The time and the tokens of the last steps.

    Args:
        window: The number of last steps.
    """

    def __init__(self, window: int = 10) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)

    def add(self, seconds: float, tokens: int) -> tuple[float, float]:
        """Note a step; return the mean of the seconds of the last ones, and their tokens per second.

        Args:
            seconds: From before the step's rollout to after its update.
            tokens: The tokens of prompts and answers that the update learned from, without padding.
        """
        self._steps.append((seconds, tokens))
        total = sum(each for each, _ in self._steps)
        return total / len(self._steps), sum(each for _, each in self._steps) / total if total else 0.0


class StepClock(PhaseClock):
    """Where the time of a step goes."""

    def __init__(self) -> None:
        super().__init__(("rollout_generate", "reward", "logprobs", "update"))

    def __str__(self) -> str:
        sampling, rewarding = self.seconds["rollout_generate"], self.seconds["reward"]
        return f"rollout {sampling:.2f} s, reward {rewarding:.2f} s"


class RewardTrend:
    """The mean reward of the last rollout, and of the last ones: one alone says little of the trend.

    Args:
        window: The number of last rollouts.
    """

    def __init__(self, window: int = 10) -> None:
        self._last: deque[float] = deque(maxlen=window)

    def add(self, reward: float) -> None:
        """Note a rollout.

        Args:
            reward: The mean reward of its answers.
        """
        self._last.append(reward)

    def __str__(self) -> str:
        if not self._last:
            return ""
        return f"reward {self._last[-1]:.3f} (last {len(self._last)}: {fmean(self._last):.3f})"
